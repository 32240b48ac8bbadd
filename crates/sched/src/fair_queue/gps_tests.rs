//! The queue against exact generalized processor sharing (GPS), and against its bounds under random tenants
//! that start, stop and send in batches.

use super::*;

/// One random tenant: weight, largest request, sending pattern.
struct TrafficSource {
    weight: u32,
    size_max: u64,
    /// Requests per batch, and the mean pause between batches.
    batch: u64,
    pause: u64,
    next_arrival: u64,
}

fn random_sources(random: &mut Prng) -> Vec<TrafficSource> {
    let source = |random: &mut Prng| TrafficSource {
        weight: random.below(8) as u32 + 1,
        size_max: [10, 100, 1000][random.below(3) as usize],
        batch: random.below(20) + 1,
        pause: random.below(20_000) + 1,
        next_arrival: random.below(1000),
    };
    (0..random.below(5) + 2).map(|_| source(random)).collect()
}

/// Service of each tenant by a fluid: all backlogged tenants at once, by weight, at 1 ns per ns.
struct GpsModel {
    weights: Vec<f64>,
    waiting: Vec<f64>,
    served: Vec<f64>,
    now: f64,
}

impl GpsModel {
    fn advance(&mut self, to: u64) {
        let mut left = to as f64 - self.now;
        while left > 0.0 {
            let active: Vec<usize> = (0..self.weights.len()).filter(|&at| self.waiting[at] > 1e-9).collect();
            let sum: f64 = active.iter().map(|&at| self.weights[at]).sum();
            // Until the first of them is empty.
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

/// Runs random senders on one server for a while and reports each begin: time, tenant, cost, backlogged tenants.
fn run_sources(
    random: &mut Prng,
    sources: &mut [TrafficSource],
    until: u64,
    mut at_begin: impl FnMut(u64, usize, u64, &FairQueue<u64>, &mut GpsModel),
) {
    let weights: Vec<u32> = sources.iter().map(|source| source.weight).collect();
    let mut queue = weighted(1, &weights);
    let count = sources.len();
    let mut gps = GpsModel {
        weights: weights.iter().map(|&weight| f64::from(weight)).collect(),
        waiting: vec![0.0; count],
        served: vec![0.0; count],
        now: 0.0,
    };
    let (mut now, mut running): (u64, Option<(u64, ServiceTicket)>) = (0, None);
    while now < until {
        let arrival = sources.iter().map(|source| source.next_arrival).min().unwrap();
        now = running.as_ref().map_or(arrival, |running| running.0.min(arrival)).max(now);
        gps.advance(now);
        if running.as_ref().is_some_and(|running| running.0 <= now) {
            queue.complete(running.take().unwrap().1, None);
        }
        for (tenant, source) in sources.iter_mut().enumerate() {
            if source.next_arrival > now {
                continue;
            }
            for _ in 0..source.batch {
                let ns = random.below(source.size_max) + 1;
                if queue.enqueue(TenantId(tenant as u32), cost(ns), ns, Nanos(now)).is_ok() {
                    gps.waiting[tenant] += ns as f64;
                }
            }
            source.next_arrival = now + 1 + random.below(2 * source.pause);
        }
        if running.is_none()
            && let Some((ticket, ns)) = queue.dequeue(Nanos(now))
        {
            at_begin(now, ticket.tenant().0 as usize, ns, &queue, &mut gps);
            running = Some((now + ns, ticket));
        }
        assert!(running.is_some() || queue.waiting() == 0, "idle only if no request waits");
    }
}

#[test]
fn backlogged_tenants_stay_within_the_bound_of_gps() {
    let random = &mut Prng::new(11);
    for _ in 0..200 {
        let mut sources = random_sources(random);
        // All send enough at first to be backlogged throughout.
        sources
            .iter_mut()
            .for_each(|source| (source.batch, source.pause, source.next_arrival) = (300, 1 << 40, 0));
        let sum: u64 = sources.iter().map(|source| u64::from(source.weight)).sum();
        let sizes: Vec<u64> = sources.iter().map(|source| source.size_max).collect();
        let weights: Vec<u64> = sources.iter().map(|source| u64::from(source.weight)).collect();
        let sizes_sum: u64 = sizes.iter().sum();
        let mut begun = vec![0_u64; sources.len()];
        let mut somebody_ended = false;
        run_sources(random, &mut sources, 1_000_000, |_, tenant, ns, queue, _| {
            begun[tenant] += ns;
            somebody_ended |= (0..begun.len()).any(|at| queue.waiting_of(TenantId(at as u32)) == 0);
            let all: u64 = begun.iter().sum();
            for at in (0..begun.len()).filter(|_| !somebody_ended) {
                // Begun − part × all, times the sum of weights, in integers.
                let off = (begun[at] * sum).abs_diff(weights[at] * all);
                let bound = (sum - weights[at]) * sizes[at] + weights[at] * (sizes_sum - sizes[at]);
                assert!(off <= bound + sum, "tenant {at} is off by {off} of {bound}, {weights:?} {sizes:?}");
            }
        });
    }
}

#[test]
fn tenants_that_come_and_go_stay_near_gps() {
    let random = &mut Prng::new(12);
    for _ in 0..300 {
        let mut sources = random_sources(random);
        let sizes: f64 = sources.iter().map(|source| source.size_max as f64).sum();
        let mut begun = vec![0.0; sources.len()];
        run_sources(random, &mut sources, 300_000, |_, tenant, ns, _, gps| {
            for (at, begun) in begun.iter().enumerate() {
                let behind = gps.served[at] - begun;
                assert!(behind <= sizes, "tenant {at} is behind by {behind} of {sizes}");
            }
            begun[tenant] += ns as f64;
        });
    }
}

#[test]
fn two_backlogged_tenants_differ_by_at_most_one_request_of_each() {
    let random = &mut Prng::new(13);
    for _ in 0..200 {
        let mut sources = random_sources(random);
        let count = sources.len();
        let of: Vec<(f64, f64)> =
            sources.iter().map(|source| (source.size_max as f64, f64::from(source.weight))).collect();
        let mut begun = vec![0.0; count];
        // By pair, since both are backlogged: the least and the greatest difference.
        let mut spans = vec![None::<(f64, f64)>; count * count];
        run_sources(random, &mut sources, 300_000, |_, tenant, ns, queue, _| {
            begun[tenant] += ns as f64 / of[tenant].1;
            // The tenant whose request just began was backlogged until now.
            let waits = |at: usize| at == tenant || queue.waiting_of(TenantId(at as u32)) > 0;
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
                        queue.waiting_of(TenantId(a as u32)) > 0 && queue.waiting_of(TenantId(b as u32)) > 0;
                    *span = (waits(a) && waits(b) && goes_on).then_some((least, most));
                }
            }
        });
    }
}

#[test]
fn no_request_waits_forever() {
    let random = &mut Prng::new(14);
    for _ in 0..200 {
        let mut sources = random_sources(random);
        let of: Vec<(u64, u64)> =
            sources.iter().map(|source| (source.size_max, u64::from(source.weight))).collect();
        // By tenant: since its first request is at the head, the work of each other tenant that began.
        let mut waited = vec![vec![0; of.len()]; of.len()];
        run_sources(random, &mut sources, 300_000, |_, tenant, ns, queue, _| {
            for at in 0..of.len() {
                if at == tenant || queue.waiting_of(TenantId(at as u32)) == 0 {
                    waited[at].fill(0);
                    continue;
                }
                waited[at][tenant] += ns;
                let bound = of[tenant].1 * of[at].0 / of[at].1 + of[tenant].0 + 1;
                assert!(waited[at][tenant] <= bound, "{} of {bound}", waited[at][tenant]);
            }
        });
    }
}
