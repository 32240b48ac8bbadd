//! How often something that hosts can cause is told: so that nobody fills the log by connecting.
//!
//! In: the time of each event. Out: whether it is told, and how many were not since the last that was.

use octokv_base::Nanos;

/// Events that are told within a span, at the most.
const TOLD_MAX: u32 = 20;
const SPAN: Nanos = Nanos::from_secs(1);

/// What one core tells of its hosts.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    since: Nanos,
    told: u32,
    untold: u64,
}

impl Gate {
    /// Whether an event is told: then how many were not before it.
    pub fn open(&mut self, now: Nanos) -> Option<u64> {
        if now.since(self.since) >= SPAN {
            (self.since, self.told) = (now, 0);
        }
        if self.told == TOLD_MAX {
            self.untold += 1;
            return None;
        }
        self.told += 1;
        Some(std::mem::take(&mut self.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_told_in_few_lines_and_counted() {
        let mut gate = Gate::default();
        let told = (0..5000).filter(|&n| gate.open(Nanos(10 + n)).is_some()).count();
        assert_eq!(told, TOLD_MAX as usize);
        assert_eq!(gate.open(SPAN + Nanos(10)), Some(5000 - u64::from(TOLD_MAX)));
        assert_eq!(gate.open(SPAN + Nanos(11)), Some(0));
    }
}
