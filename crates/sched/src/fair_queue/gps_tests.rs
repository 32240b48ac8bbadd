//! The queue beside an exact fluid, and held to its bounds on random flows that come, go and send in batches.

use super::*;

/// One random flow: weight, largest request, how it sends.
struct Sender {
    weight: u32,
    size_max: u64,
    /// Requests that come at a time, and the mean pause between batches.
    batch: u64,
    pause: u64,
    next: u64,
}

fn senders(random: &mut Random) -> Vec<Sender> {
    let sender = |random: &mut Random| Sender {
        weight: random.below(8) as u32 + 1,
        size_max: [10, 100, 1000][random.below(3) as usize],
        batch: random.below(20) + 1,
        pause: random.below(20_000) + 1,
        next: random.below(1000),
    };
    (0..random.below(5) + 2).map(|_| sender(random)).collect()
}

/// What a fluid has served of each flow: all that wait are served at once, by weight, at 1 ns a ns.
struct Fluid {
    weights: Vec<f64>,
    waiting: Vec<f64>,
    served: Vec<f64>,
    now: f64,
}

impl Fluid {
    fn advance(&mut self, to: u64) {
        let mut left = to as f64 - self.now;
        while left > 0.0 {
            let active: Vec<usize> = (0..self.weights.len()).filter(|&at| self.waiting[at] > 1e-9).collect();
            let sum: f64 = active.iter().map(|&at| self.weights[at]).sum();
            // Until the first of them has nothing left.
            let emptied = |&at: &usize| self.waiting[at] * sum / self.weights[at];
            let step = active.iter().map(emptied).fold(left, f64::min);
            for at in active {
                let work = (step * self.weights[at] / sum).min(self.waiting[at]);
                self.waiting[at] -= work;
                self.served[at] += work;
            }
            left -= step;
        }
        self.now = to as f64;
    }
}

/// Plays random senders on one server for a while, and tells at each begin: when, who, how much, and who waits.
fn play(
    random: &mut Random,
    senders: &mut [Sender],
    until: u64,
    mut at_begin: impl FnMut(u64, usize, u64, &Fair<u64>, &mut Fluid),
) {
    let weights: Vec<u32> = senders.iter().map(|sender| sender.weight).collect();
    let mut queue = weighted(1, &weights);
    let count = senders.len();
    let mut fluid = Fluid {
        weights: weights.iter().map(|&weight| f64::from(weight)).collect(),
        waiting: vec![0.0; count],
        served: vec![0.0; count],
        now: 0.0,
    };
    let (mut now, mut running): (u64, Option<(u64, Charge)>) = (0, None);
    while now < until {
        let arrival = senders.iter().map(|sender| sender.next).min().unwrap();
        now = running.as_ref().map_or(arrival, |running| running.0.min(arrival)).max(now);
        fluid.advance(now);
        if running.as_ref().is_some_and(|running| running.0 <= now) {
            queue.done(running.take().unwrap().1, None);
        }
        for (flow, sender) in senders.iter_mut().enumerate() {
            if sender.next > now {
                continue;
            }
            for _ in 0..sender.batch {
                let ns = random.below(sender.size_max) + 1;
                if queue.offer(FlowId(flow as u32), cost(ns), ns, Nanos(now)).is_ok() {
                    fluid.waiting[flow] += ns as f64;
                }
            }
            sender.next = now + 1 + random.below(2 * sender.pause);
        }
        if running.is_none()
            && let Some((charge, ns)) = queue.next(Nanos(now))
        {
            at_begin(now, charge.flow().0 as usize, ns, &queue, &mut fluid);
            running = Some((now + ns, charge));
        }
        assert!(running.is_some() || queue.waiting() == 0, "it rests only when nobody waits");
    }
}

#[test]
fn waiting_flows_have_what_a_fluid_gives_them() {
    let random = &mut Random::new(11);
    for _ in 0..200 {
        let mut senders = senders(random);
        // All send so much at first that they wait all the time.
        senders.iter_mut().for_each(|sender| (sender.batch, sender.pause, sender.next) = (300, 1 << 40, 0));
        let sum: u64 = senders.iter().map(|sender| u64::from(sender.weight)).sum();
        let sizes: Vec<u64> = senders.iter().map(|sender| sender.size_max).collect();
        let weights: Vec<u64> = senders.iter().map(|sender| u64::from(sender.weight)).collect();
        let sizes_sum: u64 = sizes.iter().sum();
        let mut begun = vec![0_u64; senders.len()];
        let mut somebody_ended = false;
        play(random, &mut senders, 1_000_000, |_, flow, ns, queue, _| {
            begun[flow] += ns;
            somebody_ended |= (0..begun.len()).any(|at| queue.waiting_of(FlowId(at as u32)) == 0);
            let all: u64 = begun.iter().sum();
            for at in (0..begun.len()).filter(|_| !somebody_ended) {
                // Begun − part × all, times the sum of weights, in whole numbers.
                let off = (begun[at] * sum).abs_diff(weights[at] * all);
                let bound = (sum - weights[at]) * sizes[at] + weights[at] * (sizes_sum - sizes[at]);
                assert!(off <= bound + sum, "flow {at} is off by {off} of {bound}, {weights:?} {sizes:?}");
            }
        });
    }
}

#[test]
fn flows_that_come_and_go_are_near_a_fluid() {
    let random = &mut Random::new(12);
    for _ in 0..300 {
        let mut senders = senders(random);
        let sizes: f64 = senders.iter().map(|sender| sender.size_max as f64).sum();
        let mut begun = vec![0.0; senders.len()];
        play(random, &mut senders, 300_000, |_, flow, ns, _, fluid| {
            for (at, begun) in begun.iter().enumerate() {
                let behind = fluid.served[at] - begun;
                assert!(behind <= sizes, "flow {at} is behind by {behind} of {sizes}");
            }
            begun[flow] += ns as f64;
        });
    }
}

#[test]
fn two_flows_that_wait_differ_by_a_request_of_each() {
    let random = &mut Random::new(13);
    for _ in 0..200 {
        let mut senders = senders(random);
        let count = senders.len();
        let of: Vec<(f64, f64)> =
            senders.iter().map(|sender| (sender.size_max as f64, f64::from(sender.weight))).collect();
        let mut begun = vec![0.0; count];
        // By pair, since both wait: the least and the most difference.
        let mut spans = vec![None::<(f64, f64)>; count * count];
        play(random, &mut senders, 300_000, |_, flow, ns, queue, _| {
            begun[flow] += ns as f64 / of[flow].1;
            // Whose request just began waited until now.
            let waits = |at: usize| at == flow || queue.waiting_of(FlowId(at as u32)) > 0;
            for a in 0..count {
                for b in 0..a {
                    let span = &mut spans[a * count + b];
                    let difference: f64 = begun[a] - begun[b];
                    let (least, most) = span.unwrap_or((difference, difference));
                    let (least, most) = (least.min(difference), most.max(difference));
                    if span.is_some() {
                        let bound = of[a].0 / of[a].1 + of[b].0 / of[b].1;
                        assert!(most - least <= bound + 1e-3, "{} of {bound}", most - least);
                    }
                    let goes_on =
                        queue.waiting_of(FlowId(a as u32)) > 0 && queue.waiting_of(FlowId(b as u32)) > 0;
                    *span = (waits(a) && waits(b) && goes_on).then_some((least, most));
                }
            }
        });
    }
}

#[test]
fn no_request_waits_for_ever() {
    let random = &mut Random::new(14);
    for _ in 0..200 {
        let mut senders = senders(random);
        let of: Vec<(u64, u64)> =
            senders.iter().map(|sender| (sender.size_max, u64::from(sender.weight))).collect();
        // By flow: since its first request is the first, what began of each other one.
        let mut waited = vec![vec![0; of.len()]; of.len()];
        play(random, &mut senders, 300_000, |_, flow, ns, queue, _| {
            for at in 0..of.len() {
                if at == flow || queue.waiting_of(FlowId(at as u32)) == 0 {
                    waited[at].fill(0);
                    continue;
                }
                waited[at][flow] += ns;
                let bound = of[flow].1 * of[at].0 / of[at].1 + of[flow].0 + 1;
                assert!(waited[at][flow] <= bound, "{} of {bound}", waited[at][flow]);
            }
        });
    }
}
