//! Flow control by device tokens: which of the requests of several tenants is sent next, by Algorithm 1 of LEED (SIGCOMM 2023, §3.5).
//!
//! ```text
//!   tenants in turn: the oldest request that is the first of its tenant for the device of its key, and that may be sent
//!     its tokens ≤ those of the device     ─▶ sent, the tokens are taken            (lines 5 to 7)
//!     none is outstanding at the device    ─▶ sent                                  (lines 11 to 13)
//!     otherwise                            ─▶ it waits, and requests for other devices pass it (line 9)
//!   response ─▶ the window of the device is that which it has
//! ```
//! In: requests with tenant, device and tokens; responses with the window of a device: the tokens that may be outstanding there. Its tokens are those of the
//! window which no outstanding request has. In the paper a response sets the tokens themselves: those of several responses that come at once, as of commands that an
//! engine committed together, would each allow requests for the same free tokens. Out: the request to send. The rules for
//! an empty device keep a request from waiting for a response that nothing would bring, as Nagle's algorithm does. A round
//! ([`FlowControl::run`]) ends when no tenant has a request that may be sent, or at its time-out, so that responses are received in between.
//!
//! In the paper a request that may not be sent goes behind all others of its tenant. Which of those for a busy device is first when that has tokens is chance
//! then, and some wait for long. Here requests of a tenant for one device keep their order.
//!
//! Invariants:
//! - A request is sent once, after the earlier requests of its tenant for its device.
//! - With windows of 0 one request for each device is outstanding.
//! - If the first request of a tenant for a device has to wait, no other tenant sends to that device before it.
//! - A step takes time proportional to tenants × devices, not to waiting requests.
//!
//! Passive, without a clock. Tested below.

use octokv_base::Nanos;
use std::collections::VecDeque;

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRequest<R> {
    /// The index of the device of its key.
    pub device: usize,
    /// Its cost.
    pub tokens: u32,
    /// The request.
    pub request: R,
}

/// Flow control of one device: the window in tokens, and the requests and tokens outstanding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DeviceFlow {
    /// The tokens that may be outstanding, as the last response had it.
    window: u32,
    /// Requests without a response, and their tokens.
    outstanding: u32,
    outstanding_tokens: u64,
    /// The tenant whose request is next: it waits for more tokens than others need, who would take them one by one.
    blocked_by: Option<usize>,
}

impl DeviceFlow {
    fn tokens(&self) -> u32 {
        u64::from(self.window).saturating_sub(self.outstanding_tokens) as u32
    }

    fn may_send(&self, tenant: usize, tokens: u32) -> bool {
        self.blocked_by.is_none_or(|by| by == tenant) && (tokens <= self.tokens() || self.outstanding == 0)
    }
}

/// The requests of a tenant that wait.
#[derive(Debug)]
struct TenantQueue<R> {
    /// By device: in the order of their arrival, with their numbers.
    by_device: Vec<VecDeque<(u64, FlowRequest<R>)>>,
}

impl<R> TenantQueue<R> {
    fn new(devices: usize) -> TenantQueue<R> {
        TenantQueue { by_device: (0..devices).map(|_| VecDeque::new()).collect() }
    }

    fn len(&self) -> usize {
        self.by_device.iter().map(VecDeque::len).sum()
    }

    /// Takes the oldest request that may be sent, of the first for each device. A first request that may not be sent blocks its device for the other tenants.
    fn take(&mut self, tenant: usize, devices: &mut [DeviceFlow]) -> Option<FlowRequest<R>> {
        let mut oldest = None;
        for (queue, device) in self.by_device.iter().zip(&mut *devices) {
            let Some((number, request)) = queue.front() else { continue };
            match device.may_send(tenant, request.tokens) {
                true => {
                    let candidate = (*number, request.device);
                    oldest = Some(oldest.map_or(candidate, |oldest: (u64, usize)| oldest.min(candidate)));
                }
                false => device.blocked_by = device.blocked_by.or(Some(tenant)),
            }
        }
        let (_, device) = oldest?;
        devices[device].blocked_by = None;
        self.by_device[device].pop_front().map(|(_, request)| request)
    }
}

/// See the module header.
#[derive(Debug)]
pub struct FlowControl<R> {
    devices: Vec<DeviceFlow>,
    tenants: Vec<TenantQueue<R>>,
    /// The tenant whose turn it is.
    turn: usize,
    /// The number of the next request.
    arrived: u64,
}

impl<R> FlowControl<R> {
    /// A scheduler for so many tenants, and devices with these windows.
    ///
    /// # Panics
    /// Without a tenant or a device.
    pub fn new(tenants: usize, windows: &[u32]) -> FlowControl<R> {
        assert!(tenants > 0 && !windows.is_empty(), "at least one tenant and one device");
        let device = |&window: &u32| DeviceFlow { window, ..DeviceFlow::default() };
        let devices: Vec<DeviceFlow> = windows.iter().map(device).collect();
        let tenants = (0..tenants).map(|_| TenantQueue::new(devices.len())).collect();
        FlowControl { devices, tenants, turn: 0, arrived: 0 }
    }

    /// Adds a request of a tenant. The caller bounds how many wait.
    ///
    /// # Panics
    /// If there is no such tenant or device.
    pub fn enqueue(&mut self, tenant: usize, request: FlowRequest<R>) {
        assert!(request.device < self.devices.len(), "device {} of {}", request.device, self.devices.len());
        self.tenants[tenant].by_device[request.device].push_back((self.arrived, request));
        self.arrived += 1;
    }

    /// The requests that wait.
    pub fn waiting(&self) -> usize {
        self.tenants.iter().map(TenantQueue::len).sum()
    }

    /// The tokens of a device.
    pub fn tokens(&self, device: usize) -> u32 {
        self.devices[device].tokens()
    }

    /// The requests of a device without a response.
    pub fn outstanding(&self, device: usize) -> u32 {
        self.devices[device].outstanding
    }

    /// The next request that may be sent, of the next tenant that has one; the caller sends it.
    pub fn next_request(&mut self) -> Option<FlowRequest<R>> {
        for _ in 0..self.tenants.len() {
            let tenant = self.turn;
            self.turn = (self.turn + 1) % self.tenants.len();
            if let Some(request) = self.tenants[tenant].take(tenant, &mut self.devices) {
                let device = &mut self.devices[request.device];
                device.outstanding += 1;
                device.outstanding_tokens += u64::from(request.tokens);
                return Some(request);
            }
        }
        None
    }

    /// Sends requests until none may be sent, or until `deadline`; `now` reads the clock before each. How many it sent.
    pub fn run(
        &mut self,
        deadline: Nanos,
        mut now: impl FnMut() -> Nanos,
        mut send: impl FnMut(FlowRequest<R>),
    ) -> usize {
        let mut sent = 0;
        while now() < deadline
            && let Some(request) = self.next_request()
        {
            send(request);
            sent += 1;
        }
        sent
    }

    /// A request of a device ended, which had so many tokens: with its response, which has the window of the device, or without one.
    ///
    /// # Panics
    /// If none of the device with as many tokens is outstanding.
    pub fn complete(&mut self, device: usize, tokens: u32, window: Option<u32>) {
        let device = &mut self.devices[device];
        device.outstanding = device.outstanding.checked_sub(1).expect("a request ends once");
        let left = device.outstanding_tokens.checked_sub(u64::from(tokens));
        device.outstanding_tokens = left.expect("with the tokens that it had");
        device.window = window.unwrap_or(device.window);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    fn request(device: usize, tokens: u32, request: u32) -> FlowRequest<u32> {
        FlowRequest { device, tokens, request }
    }

    /// A scheduler whose tenants have these requests: device, tokens, number.
    fn flow(device_tokens: &[u32], tenants: &[&[(usize, u32, u32)]]) -> FlowControl<u32> {
        let mut flow = FlowControl::new(tenants.len(), device_tokens);
        for (tenant, requests) in tenants.iter().enumerate() {
            requests.iter().for_each(|&(device, tokens, number)| {
                flow.enqueue(tenant, request(device, tokens, number));
            });
        }
        flow
    }

    fn sent(flow: &mut FlowControl<u32>) -> Vec<u32> {
        let mut sent = Vec::new();
        flow.run(Nanos::NEVER, || Nanos::ZERO, |request| sent.push(request.request));
        sent
    }

    #[test]
    fn tenants_take_turns() {
        let one = [(0, 16, 10), (0, 16, 11), (0, 16, 12)];
        let mut flow = flow(&[1000], &[&one, &[], &[(0, 16, 20), (0, 16, 21)]]);
        assert_eq!(sent(&mut flow), [10, 20, 11, 21, 12]);
        assert_eq!((flow.tokens(0), flow.outstanding(0), flow.waiting()), (1000 - 5 * 16, 5, 0));
    }

    #[test]
    fn a_request_is_sent_if_its_device_has_tokens_for_it() {
        let mut flow = flow(&[40], &[&[(0, 16, 1), (0, 16, 2), (0, 16, 3)]]);
        assert_eq!(sent(&mut flow), [1, 2], "8 tokens are left");
        assert_eq!((flow.tokens(0), flow.waiting()), (8, 1));
        flow.complete(0, 16, Some(31));
        assert_eq!(sent(&mut flow), [0; 0]);
        flow.enqueue(0, request(0, 16, 4));
        flow.complete(0, 16, Some(32));
        assert_eq!((sent(&mut flow), flow.tokens(0)), (vec![3, 4], 0));
    }

    #[test]
    fn responses_that_come_at_once_allow_no_more_than_the_window() {
        let mut flow =
            flow(&[64], &[&[(0, 16, 1), (0, 16, 2), (0, 16, 3), (0, 16, 4), (0, 16, 5), (0, 16, 6)]]);
        assert_eq!(sent(&mut flow), [1, 2, 3, 4]);
        for number in [5, 6] {
            flow.complete(0, 16, Some(64));
            assert_eq!(sent(&mut flow), [number]);
        }
        flow.enqueue(0, request(0, 16, 7));
        flow.complete(0, 16, Some(48));
        assert_eq!(sent(&mut flow), [0; 0], "three are outstanding");
    }

    #[test]
    fn a_request_for_a_device_at_which_none_is_outstanding_is_sent_without_tokens() {
        let mut flow = flow(&[10], &[&[(0, 64, 1), (0, 4, 2)]]);
        assert_eq!(sent(&mut flow), [1], "and takes the 10 tokens that there are");
        assert_eq!((flow.tokens(0), flow.outstanding(0)), (0, 1));
        flow.complete(0, 64, None);
        assert_eq!(sent(&mut flow), [2], "one that was lost holds up none");
    }

    #[test]
    fn a_device_without_tokens_holds_up_no_request_for_another() {
        let one = [(0, 16, 1), (0, 16, 2), (1, 16, 3), (0, 16, 4), (1, 16, 5)];
        let mut flow = flow(&[0, 100], &[&one]);
        assert_eq!(sent(&mut flow), [1, 3, 5]);
        assert_eq!((flow.outstanding(0), flow.outstanding(1), flow.waiting()), (1, 2, 2));
    }

    #[test]
    fn requests_for_a_busy_device_are_sent_in_the_order_of_their_arrival() {
        let mut flow = flow(&[32, 100], &[&[(0, 16, 1), (0, 16, 2)]]);
        assert_eq!(sent(&mut flow), [1, 2]);
        for number in 3..100 {
            flow.enqueue(0, request(usize::from(number % 7 == 0), 16, number));
        }
        sent(&mut flow);
        let mut order = Vec::new();
        while flow.waiting() > 0 {
            // Each response has room for one more; a pass over the others in between changes nothing.
            flow.complete(0, 16, Some(32));
            flow.run(Nanos::NEVER, || Nanos::ZERO, |request| order.extend([request.request]));
            assert!(flow.next_request().is_none());
            if flow.outstanding(1) > 0 {
                flow.complete(1, 16, None);
            }
        }
        order.retain(|number| number % 7 != 0);
        assert_eq!(order, (3..100).filter(|number| number % 7 != 0).collect::<Vec<u32>>());
    }

    #[test]
    fn a_large_request_is_not_passed_for_ever_by_small_ones_of_another_tenant() {
        let small: Vec<_> = (0..40).map(|number| (0, 16, number)).collect();
        let mut flow = flow(&[64], &[&small, &[]]);
        let mut order = sent(&mut flow);
        assert_eq!(order, [0, 1, 2, 3]);
        flow.enqueue(1, request(0, 64, 100));
        for _ in 0..5 {
            flow.complete(0, 16, Some(64));
            order.extend(sent(&mut flow));
        }
        assert!(order[4..=5].contains(&100), "it is sent once those before it have ended: {order:?}");
    }

    #[test]
    fn a_round_ends_at_its_time_out() {
        let requests: Vec<_> = (0..100).map(|number| (0, 1, number)).collect();
        let mut flow = flow(&[1000], &[&requests]);
        let mut time = Nanos::ZERO;
        let clock = || {
            time = time + Nanos(10);
            time
        };
        let count = flow.run(Nanos(100), clock, |_| ());
        assert_eq!((count, flow.waiting()), (9, 91));
        assert_eq!(sent(&mut flow).len(), 91);
    }

    #[test]
    fn every_request_is_sent_once_whatever_responses_tell() {
        let mut random = Prng::new(5);
        for _ in 0..200 {
            let devices = 1 + random.below(4) as usize;
            let mut flow = FlowControl::new(3, &vec![random.below(64) as u32; devices]);
            for number in 0..100 {
                let device = random.below(devices as u64) as usize;
                let one = request(device, 1 + random.below(64) as u32, number);
                flow.enqueue(random.below(3) as usize, one);
            }
            let (mut in_flight, mut done) = (Vec::new(), vec![0; 100]);
            while flow.waiting() + in_flight.len() > 0 {
                flow.run(Nanos::NEVER, || Nanos::ZERO, |request| in_flight.push(request));
                assert!(!in_flight.is_empty(), "one request at least is outstanding while others wait");
                let ended = in_flight.swap_remove(random.below(in_flight.len() as u64) as usize);
                done[ended.request as usize] += 1;
                flow.complete(ended.device, ended.tokens, random.one_in(3).then(|| random.below(64) as u32));
            }
            assert!(done.iter().all(|&times| times == 1));
        }
    }
}
