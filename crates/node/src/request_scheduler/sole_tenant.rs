//! Whether a core has had the requests of one tenant only for a while, so that there is nothing to be fair about.

use octokv_base::Nanos;
use octokv_sched::TenantId;

/// The time without other tenants' requests after which a tenant counts as alone: several iterations under any load.
const ALONE_AFTER: Nanos = Nanos::from_millis(10);

/// The tenant of the last request, and since when there were no others.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SoleTenant(Option<(TenantId, Nanos)>);

impl SoleTenant {
    /// Records a request of `tenant`.
    #[inline]
    pub fn record(&mut self, tenant: TenantId, now: Nanos) {
        if self.0.is_none_or(|(last, _)| last != tenant) {
            self.0 = Some((tenant, now));
        }
    }

    /// Whether there were requests of `tenant` only, for long enough.
    #[inline]
    pub fn is_alone(&self, tenant: TenantId, now: Nanos) -> bool {
        self.0.is_some_and(|(last, since)| last == tenant && now.since(since) >= ALONE_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_is_alone_10_ms_after_the_last_change_of_tenants() {
        let at = Nanos::from_millis;
        let (one, other) = (TenantId(1), TenantId(2));
        let mut sole = SoleTenant::default();
        assert!(!sole.is_alone(one, at(100)), "nobody was there");
        sole.record(one, at(100));
        sole.record(one, at(105));
        assert!(
            !sole.is_alone(one, at(109)) && sole.is_alone(one, at(110)) && !sole.is_alone(other, at(200))
        );
        sole.record(other, at(200));
        assert!(!sole.is_alone(one, at(200)));
        sole.record(one, at(201));
        assert!(!sole.is_alone(one, at(210)) && sole.is_alone(one, at(211)));
    }
}
