//! Order in which an iteration serves connections: light ones first, then heavy ones.
//!
//! ```text
//!   light:  c d a b          all of them, while the iteration has time
//!   heavy:  g h e f          then these, at least one
//!           └─ each class begins with the first connection that the last iteration did not reach
//! ```
//! In: connections, each with whether it is heavy. Out: the next one to serve. Light connections use little time by
//! definition, so serving them first is cheap for the others; at least one heavy connection is served per iteration,
//! so that many light ones do not starve it (like sparse flows before bulk flows in FQ-CoDel, RFC 8290, section 4.2).

/// The connections of one iteration.
#[derive(Debug, Default)]
pub struct ConnectionQueue {
    light: PriorityClass,
    heavy: PriorityClass,
    /// Whether the current connection is heavy; whether a heavy one was served in this iteration.
    current_is_heavy: bool,
    heavy_served: bool,
}

/// Unserved connections remembered per class: several, because the first of them may be idle in the next iteration.
const CARRIED_OVER_MAX: usize = 8;

#[derive(Debug, Default)]
struct PriorityClass {
    members: Vec<u32>,
    /// Index of the next member in this iteration.
    cursor: usize,
    /// The first unserved members of the last iteration.
    carried_over: Vec<u32>,
}

impl PriorityClass {
    /// Rotates the first unserved member to the front.
    fn begin(&mut self) {
        self.cursor = 0;
        if self.carried_over.is_empty() {
            return;
        }
        let mut positions = self
            .carried_over
            .drain(..)
            .filter_map(|first| self.members.iter().position(|&member| member == first));
        let start = positions.next().unwrap_or(0);
        drop(positions);
        self.members.rotate_left(start);
    }

    fn next(&mut self) -> Option<u32> {
        let next = self.members.get(self.cursor).copied();
        self.cursor += usize::from(next.is_some());
        next
    }

    fn end(&mut self) {
        let rest = &self.members[self.cursor..];
        if !rest.is_empty() {
            self.carried_over.extend_from_slice(&rest[..rest.len().min(CARRIED_OVER_MAX)]);
        }
    }

    fn unserved(&self) -> impl Iterator<Item = u32> {
        self.members[self.cursor..].iter().copied()
    }
}

impl ConnectionQueue {
    /// Starts an iteration with these connections; the flag says whether one is heavy.
    pub fn rebuild(&mut self, members: impl Iterator<Item = (u32, bool)>) {
        self.light.members.clear();
        self.heavy.members.clear();
        for (member, is_heavy) in members {
            let class = if is_heavy { &mut self.heavy } else { &mut self.light };
            class.members.push(member);
        }
        self.light.begin();
        self.heavy.begin();
        self.heavy_served = false;
    }

    /// Connections in the queue.
    pub fn len(&self) -> usize {
        self.light.members.len() + self.heavy.members.len()
    }

    /// The next connection. With `over_budget` only a heavy one, and only if none was served yet.
    pub fn next(&mut self, over_budget: bool) -> Option<u32> {
        self.current_is_heavy = false;
        if !over_budget && let Some(next) = self.light.next() {
            return Some(next);
        }
        self.current_is_heavy = true;
        if over_budget && self.heavy_served { None } else { self.heavy.next() }
    }

    /// Records that the current connection had work.
    pub fn mark_served(&mut self) {
        self.heavy_served |= self.current_is_heavy;
    }

    /// Ends the iteration and remembers the unserved connections.
    pub fn finish(&mut self) {
        self.light.end();
        self.heavy.end();
    }

    /// The connections that were not reached.
    pub fn unserved(&self) -> impl Iterator<Item = u32> {
        self.light.unserved().chain(self.heavy.unserved())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members 0 to 4 are light, 5 to 9 heavy; an iteration serves at most `served_max` of them before it is over
    /// budget.
    fn serve_iteration(queue: &mut ConnectionQueue, served_max: usize) -> Vec<u32> {
        queue.rebuild((0..10).map(|member| (member, member >= 5)));
        let mut served = Vec::new();
        while let Some(member) = queue.next(served.len() >= served_max) {
            served.push(member);
            queue.mark_served();
        }
        queue.finish();
        let mut all: Vec<u32> = served.iter().copied().chain(queue.unserved()).collect();
        all.sort_unstable();
        assert_eq!(all, (0..10).collect::<Vec<u32>>(), "the unserved ones are reported");
        served
    }

    #[test]
    fn light_connections_are_served_before_heavy_ones() {
        assert_eq!(serve_iteration(&mut ConnectionQueue::default(), 100), (0..10).collect::<Vec<u32>>());
        assert_eq!(serve_iteration(&mut ConnectionQueue::default(), 7), (0..7).collect::<Vec<u32>>());
    }

    #[test]
    fn connections_not_served_are_first_in_the_next_iteration() {
        let queue = &mut ConnectionQueue::default();
        assert_eq!(serve_iteration(queue, 7), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(serve_iteration(queue, 7), [0, 1, 2, 3, 4, 7, 8]);
        assert_eq!(serve_iteration(queue, 7), [0, 1, 2, 3, 4, 9, 5]);
        assert_eq!(serve_iteration(queue, 7), [0, 1, 2, 3, 4, 6, 7]);
    }

    #[test]
    fn many_light_connections_do_not_starve_heavy_ones() {
        let queue = &mut ConnectionQueue::default();
        assert_eq!(serve_iteration(queue, 3), [0, 1, 2, 5]);
        assert_eq!(serve_iteration(queue, 3), [3, 4, 0, 6]);
        assert_eq!(serve_iteration(queue, 3), [1, 2, 3, 7]);
        assert_eq!(serve_iteration(queue, 0), [8], "also in an iteration without time");
    }

    #[test]
    fn an_idle_heavy_connection_does_not_use_up_the_heavy_slot() {
        let queue = &mut ConnectionQueue::default();
        queue.rebuild([(5, true), (6, true), (7, true), (1, false)].into_iter());
        assert_eq!((queue.next(true), queue.next(true)), (Some(5), Some(6)));
        queue.mark_served();
        assert_eq!(queue.next(true), None);
        queue.finish();
        assert_eq!(queue.unserved().collect::<Vec<u32>>(), [1, 7]);
    }

    #[test]
    fn a_removed_connection_does_not_change_the_order_of_the_others() {
        let queue = &mut ConnectionQueue::default();
        serve_iteration(queue, 6);
        queue.rebuild([(7, true), (8, true)].into_iter());
        assert_eq!(queue.next(false), Some(7));
        queue.rebuild(std::iter::empty());
        assert_eq!(queue.next(false), None);
        queue.finish();
        assert_eq!(queue.unserved().count(), 0);
    }
}
