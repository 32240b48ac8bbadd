//! Maps hosts to tenants: small numbers by which per-tenant state is indexed.
//!
//! In: a host's name, when one of its connections sends its first request and when that connection ends. Out: a
//! [`TenantId`] below [`TENANTS_MAX`]. All cores share the table and take its lock once per connection, not per
//! request.
//!
//! Invariants: a host has one tenant on all its connections and cores; a freed number is reused last; number 0 is
//! shared by hosts beyond the bound and by connections without a name.

use octokv_sched::TenantId;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Tenant numbers, the shared overflow number included.
pub const TENANTS_MAX: u32 = 256;
/// The tenant of all hosts beyond the bound, and of connections without a name.
pub const OVERFLOW_TENANT: TenantId = TenantId(0);

#[derive(Debug)]
struct TenantEntry {
    host: String,
    connections: usize,
}

#[derive(Debug)]
struct TenantTableInner {
    /// By tenant number.
    entries: Vec<Option<TenantEntry>>,
    free_ids: VecDeque<u32>,
}

/// The tenants of a node.
#[derive(Debug)]
pub struct TenantTable(Mutex<TenantTableInner>);

impl Default for TenantTable {
    fn default() -> TenantTable {
        let entries = std::iter::repeat_with(|| None).take(TENANTS_MAX as usize).collect();
        TenantTable(Mutex::new(TenantTableInner { entries, free_ids: (1..TENANTS_MAX).collect() }))
    }
}

impl TenantTable {
    /// Counts a connection of `host` and returns its tenant. [`TenantTable::release`] undoes it.
    pub fn acquire(&self, host: &str) -> TenantId {
        if host.is_empty() {
            return OVERFLOW_TENANT;
        }
        let inner = &mut *self.0.lock();
        let existing =
            inner.entries.iter_mut().position(|entry| entry.as_ref().is_some_and(|entry| entry.host == host));
        let number = match existing {
            Some(number) => number,
            None => match inner.free_ids.pop_front() {
                Some(number) => number as usize,
                None => return OVERFLOW_TENANT,
            },
        };
        let entry = inner.entries[number]
            .get_or_insert_with(|| TenantEntry { host: host.to_owned(), connections: 0 });
        entry.connections += 1;
        TenantId(number as u32)
    }

    /// Releases a connection's tenant. The last release frees the number.
    ///
    /// # Panics
    /// The tenant has no connection.
    pub fn release(&self, tenant: TenantId) {
        if tenant == OVERFLOW_TENANT {
            return;
        }
        let table = &mut *self.0.lock();
        let entry = &mut table.entries[tenant.0 as usize];
        let connections_left = entry.as_mut().map(|occupied| {
            occupied.connections -= 1;
            occupied.connections
        });
        assert!(connections_left.is_some(), "{tenant} was released but not acquired");
        if connections_left == Some(0) {
            *entry = None;
            table.free_ids.push_back(tenant.0);
        }
    }

    /// The tenants with connections and their hosts' names, by number.
    pub fn names(&self) -> Vec<(TenantId, String)> {
        let inner = self.0.lock();
        let named = inner.entries.iter().enumerate();
        named
            .filter_map(|(number, entry)| Some((TenantId(number as u32), entry.as_ref()?.host.clone())))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_one_tenant_on_all_its_connections_and_a_free_id_is_reused_last() {
        let tenants = TenantTable::default();
        let (a, b) = (tenants.acquire("a"), tenants.acquire("b"));
        assert_ne!(a, b);
        assert_eq!(tenants.acquire("a"), a);
        assert_eq!(tenants.names(), [(a, "a".to_owned()), (b, "b".to_owned())]);
        tenants.release(a);
        assert_eq!(tenants.acquire("a"), a, "one of its connections is open");
        tenants.release(a);
        tenants.release(a);
        assert_eq!(tenants.names(), [(b, "b".to_owned())]);
        assert_eq!(tenants.acquire("c"), TenantId(3));
        assert_eq!(tenants.acquire("a"), TenantId(4));
    }

    #[test]
    fn hosts_beyond_the_bound_and_without_a_name_share_one_tenant() {
        let tenants = TenantTable::default();
        assert_eq!(tenants.acquire(""), OVERFLOW_TENANT);
        for host in 1..TENANTS_MAX {
            assert_eq!(tenants.acquire(&host.to_string()), TenantId(host));
        }
        assert_eq!((tenants.acquire("one more"), tenants.acquire("7")), (OVERFLOW_TENANT, TenantId(7)));
        tenants.release(OVERFLOW_TENANT);
        tenants.release(TenantId(9));
        assert_eq!((tenants.acquire("one more"), tenants.acquire("another")), (TenantId(9), OVERFLOW_TENANT));
    }
}
