//! Hosts that compete for the tokens of a device: the client's Algorithm 1, the shares of controllers and the capacity of the device together, in virtual time.
//!
//! ```text
//!   FlowControl of each host ──20 µs──▶ TokenShares::begin ─▶ queue of the device (DeviceTokens) ─▶ model of a device
//!            ▲                                                                                     │
//!            └──────────────20 µs────────── window in the completion ◀── TokenHold::end ◀──────────┘
//! ```

use octokv_base::Nanos;
use octokv_client::{FlowControl, FlowRequest};
use octokv_nvmf::{ShareOwner, TokenCommand, TokenHold, TokenShares, TokenSource};
use octokv_sched::{CostKind, DeviceTokens, EndedCommand, StartingCosts};
use octokv_wire::device_log::DeviceLog;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// One way between a host and the target.
const ONE_WAY: Nanos = Nanos::from_micros(20);
const DURATION: Nanos = Nanos::from_secs(1);
/// When the capacity has adapted.
const MEASURE_FROM: Nanos = Nanos::from_millis(500);

/// How a device serves commands.
#[derive(Clone, Copy)]
enum Service {
    /// An engine that commits Puts in groups: 100 µs and 1 µs for each, at most 64 in one, one group at a time.
    Groups,
    /// 32 Gets at a time, 80 µs each.
    Parallel,
}

impl Service {
    fn kind(self) -> CostKind {
        match self {
            Service::Groups => CostKind::Put,
            Service::Parallel => CostKind::Get,
        }
    }

    /// In starting tokens, by which hosts count.
    fn cost(self) -> u32 {
        StartingCosts::default().of(self.kind(), 0)
    }
}

/// What the queue of the device publishes.
#[derive(Debug, Default)]
struct Published {
    capacity: AtomicU32,
    free: AtomicU32,
    cost: AtomicU32,
}

impl TokenSource for Published {
    fn devices_max(&self) -> usize {
        1
    }
    fn device_of(&self, _key: &[u8]) -> u8 {
        0
    }
    fn capacity(&self, _device: u8) -> u32 {
        self.capacity.load(Relaxed)
    }
    fn free_tokens(&self, _device: u8) -> u32 {
        self.free.load(Relaxed)
    }
    fn cost(&self, _device: u8, _command: TokenCommand) -> u32 {
        self.cost.load(Relaxed)
    }
    fn device_log(&self) -> DeviceLog {
        unreachable!("hosts know the device")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives { host: usize },
    Served { command: usize },
    Response { host: usize, window: u32 },
}

/// A command at the target.
struct Command {
    host: usize,
    hold: Option<TokenHold>,
    cost: u32,
    began_at: Nanos,
}

struct Competition {
    service: Service,
    now: Nanos,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    sequence: u64,
    weights: Vec<u32>,
    /// `None` of a host that sends without regard to tokens.
    flows: Vec<FlowControl<()>>,
    uses_tokens: bool,
    shares: Arc<TokenShares>,
    published: Arc<Published>,
    tokens: DeviceTokens,
    commands: Vec<Command>,
    waiting: VecDeque<usize>,
    waiting_cost: u32,
    /// Admitted, for the next group.
    admitted: Vec<usize>,
    servers: Vec<Nanos>,
    in_group: usize,
    done: Vec<u64>,
}

impl Competition {
    /// Hosts of these weights, each with so many requests at all times.
    fn run(service: Service, hosts: &[(u32, usize)], uses_tokens: bool) -> Vec<u64> {
        let published = Arc::new(Published::default());
        let shares = TokenShares::new(Arc::clone(&published) as Arc<dyn TokenSource>);
        let initial = if uses_tokens { 512 } else { u32::MAX };
        let mut competition = Competition {
            service,
            now: Nanos(1),
            events: BinaryHeap::new(),
            sequence: 0,
            weights: hosts.iter().map(|host| host.0).collect(),
            flows: hosts.iter().map(|_| FlowControl::new(1, &[initial])).collect(),
            uses_tokens,
            shares,
            published,
            tokens: DeviceTokens::new(StartingCosts::default()),
            commands: Vec::new(),
            waiting: VecDeque::new(),
            waiting_cost: 0,
            admitted: Vec::new(),
            servers: vec![Nanos::ZERO; 32],
            in_group: 0,
            done: vec![0; hosts.len()],
        };
        competition.publish();
        for (host, &(_, depth)) in hosts.iter().enumerate() {
            (0..depth).for_each(|_| competition.enqueue(host));
            competition.send(host);
        }
        competition.play();
        competition.done
    }

    fn at(&mut self, time: Nanos, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((time, self.sequence, event)));
    }

    fn enqueue(&mut self, host: usize) {
        let tokens = self.service.cost();
        self.flows[host].enqueue(0, FlowRequest { device: 0, tokens, request: () });
    }

    fn send(&mut self, host: usize) {
        let mut sent = 0;
        self.flows[host].run(Nanos::NEVER, || Nanos::ZERO, |_| sent += 1);
        (0..sent).for_each(|_| self.at(self.now + ONE_WAY, Event::Arrives { host }));
    }

    fn publish(&self) {
        let (limit, taken) = (self.tokens.limit(), self.tokens.active() + self.waiting_cost);
        // One kind alone: all costs have the same ratio.
        let starting =
            |tokens: u32| tokens * self.service.cost() / self.tokens.costs().of(self.service.kind(), 0);
        self.published.capacity.store(starting(limit), Relaxed);
        self.published.free.store(starting(limit.saturating_sub(taken)), Relaxed);
        self.published.cost.store(self.service.cost(), Relaxed);
    }

    fn play(&mut self) {
        while let Some(Reverse((time, _, event))) = self.events.pop()
            && time < DURATION
        {
            self.now = time;
            match event {
                Event::Arrives { host } => self.arrive(host),
                Event::Served { command } => self.complete(command),
                Event::Response { host, window } => {
                    self.flows[host].complete(0, self.service.cost(), Some(window));
                    self.enqueue(host);
                    self.send(host);
                }
            }
        }
    }

    fn arrive(&mut self, host: usize) {
        let owner = ShareOwner { controller: host as u16, weight: self.weights[host] };
        let hold = self.shares.begin(owner, b"key", TokenCommand::Get);
        let cost = self.tokens.costs().of(self.service.kind(), 0);
        self.commands.push(Command { host, hold, cost, began_at: Nanos::ZERO });
        self.waiting.push_back(self.commands.len() - 1);
        self.waiting_cost += cost;
        self.admit();
    }

    fn admit(&mut self) {
        while let Some(&command) = self.waiting.front()
            && self.tokens.try_begin(self.commands[command].cost)
        {
            self.waiting.pop_front();
            self.waiting_cost -= self.commands[command].cost;
            self.commands[command].began_at = self.now;
            self.admitted.push(command);
        }
        self.publish();
        match self.service {
            Service::Groups if self.in_group == 0 => {
                let group: Vec<_> = self.admitted.drain(..self.admitted.len().min(64)).collect();
                self.in_group = group.len();
                let end = self.now + Nanos::from_micros(100 + group.len() as u64);
                group.into_iter().for_each(|command| self.at(end, Event::Served { command }));
            }
            Service::Groups => {}
            Service::Parallel => {
                for command in std::mem::take(&mut self.admitted) {
                    let server = self.servers.iter_mut().min().expect("there are some");
                    *server = (*server).max(self.now) + Nanos::from_micros(80);
                    let end = *server;
                    self.at(end, Event::Served { command });
                }
            }
        }
    }

    fn complete(&mut self, command: usize) {
        let Command { host, ref mut hold, cost, began_at } = self.commands[command];
        let hold = hold.take().expect("ends once");
        let ended = EndedCommand { kind: self.service.kind(), bytes: 0, began_at, ended_at: self.now };
        self.tokens.end(cost, Some(ended));
        self.in_group = self.in_group.saturating_sub(1);
        self.admit();
        let window = if self.uses_tokens { hold.end(self.weights[host]) } else { u32::MAX };
        self.done[host] += u64::from(self.now > MEASURE_FROM);
        self.at(self.now + ONE_WAY, Event::Response { host, window });
    }
}

fn sum(done: &[u64]) -> f64 {
    done.iter().sum::<u64>() as f64
}

#[test]
fn equal_hosts_together_use_the_capacity_of_a_device_that_commits_in_groups() {
    let hosts = [(1, 32); 12];
    let most = Competition::run(Service::Groups, &hosts, false);
    let done = Competition::run(Service::Groups, &hosts, true);
    assert!(sum(&done) > 0.9 * sum(&most), "{} of {}", sum(&done), sum(&most));
    let mean = sum(&done) / 12.0;
    assert!(done.iter().all(|&one| (one as f64 - mean).abs() < mean / 5.0), "{done:?}");
}

#[test]
fn hosts_that_saturate_a_device_share_it_by_their_weights() {
    for (service, depth) in [(Service::Groups, 512), (Service::Parallel, 256)] {
        let done = Competition::run(service, &[(3, depth), (1, depth)], true);
        let ratio = done[0] as f64 / done[1] as f64;
        assert!((2.5..3.5).contains(&ratio), "{ratio}: {done:?}");
        let most = Competition::run(service, &[(3, depth), (1, depth)], false);
        assert!(sum(&done) > 0.85 * sum(&most), "{} of {}", sum(&done), sum(&most));
    }
}

#[test]
fn a_host_alone_has_the_device_and_light_ones_take_little_of_it() {
    let alone = Competition::run(Service::Parallel, &[(1, 64)], true);
    let most = Competition::run(Service::Parallel, &[(1, 64)], false);
    assert!(sum(&alone) > 0.95 * sum(&most), "{alone:?} of {most:?}");
    let mut hosts = [(1, 1); 12];
    hosts[0].1 = 64;
    let done = Competition::run(Service::Parallel, &hosts, true);
    let most = Competition::run(Service::Parallel, &hosts, false);
    assert!(sum(&done) > 0.85 * sum(&most), "{done:?} of {most:?}");
}
