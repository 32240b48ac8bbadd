//! Flows: the tenants of a node, which are its hosts by name, under small numbers.
//!
//! In: hosts' names, when their connections ask for something first and when they end. Out: a [`FlowId`] below
//! [`FLOWS_MAX`]. Shared by all cores; asked once for a connection, not for each request.
//!
//! Invariants: a name has one flow while a connection of it is there, on whatever cores; a number that becomes free is
//! given again last; the first number is for all hosts beyond the bound together, and for those without a name.

use octokv_sched::FlowId;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// How many flows are told apart, the one for all others included.
pub const FLOWS_MAX: u32 = 256;
/// Whoever is not told apart.
pub const OTHERS: FlowId = FlowId(0);

#[derive(Debug)]
struct Flow {
    host: String,
    connections: usize,
}

#[derive(Debug)]
struct Table {
    /// By number.
    flows: Vec<Option<Flow>>,
    free: VecDeque<u32>,
}

/// All flows of a node.
#[derive(Debug)]
pub struct Flows(Mutex<Table>);

impl Default for Flows {
    fn default() -> Flows {
        let flows = std::iter::repeat_with(|| None).take(FLOWS_MAX as usize).collect();
        Flows(Mutex::new(Table { flows, free: (1..FLOWS_MAX).collect() }))
    }
}

impl Flows {
    /// A connection of a host begins. It ends by [`Flows::leave`].
    pub fn join(&self, host: &str) -> FlowId {
        if host.is_empty() {
            return OTHERS;
        }
        let table = &mut *self.0.lock();
        let there =
            table.flows.iter_mut().position(|flow| flow.as_ref().is_some_and(|flow| flow.host == host));
        let number = match there {
            Some(number) => number,
            None => match table.free.pop_front() {
                Some(number) => number as usize,
                None => return OTHERS,
            },
        };
        let flow = table.flows[number].get_or_insert_with(|| Flow { host: host.to_owned(), connections: 0 });
        flow.connections += 1;
        FlowId(number as u32)
    }

    /// A connection has ended.
    pub fn leave(&self, flow: FlowId) {
        if flow == OTHERS {
            return;
        }
        let table = &mut *self.0.lock();
        let entry = &mut table.flows[flow.0 as usize];
        let left = entry.as_mut().map(|flow| {
            flow.connections -= 1;
            flow.connections
        });
        assert!(left.is_some(), "{flow} left and was not there");
        if left == Some(0) {
            *entry = None;
            table.free.push_back(flow.0);
        }
    }

    /// The flows that are there, with their hosts' names, by number.
    pub fn names(&self) -> Vec<(FlowId, String)> {
        let table = self.0.lock();
        let named = table.flows.iter().enumerate();
        named
            .filter_map(|(number, flow)| Some((FlowId(number as u32), flow.as_ref()?.host.clone())))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_one_flow_on_all_its_connections_and_a_number_is_used_again_last() {
        let flows = Flows::default();
        let (a, b) = (flows.join("a"), flows.join("b"));
        assert_ne!(a, b);
        assert_eq!(flows.join("a"), a);
        assert_eq!(flows.names(), [(a, "a".to_owned()), (b, "b".to_owned())]);
        flows.leave(a);
        assert_eq!(flows.join("a"), a, "one of its connections is there");
        flows.leave(a);
        flows.leave(a);
        assert_eq!(flows.names(), [(b, "b".to_owned())]);
        assert_eq!(flows.join("c"), FlowId(3));
        assert_eq!(flows.join("a"), FlowId(4));
    }

    #[test]
    fn hosts_beyond_the_bound_and_without_a_name_are_one_flow() {
        let flows = Flows::default();
        assert_eq!(flows.join(""), OTHERS);
        for host in 1..FLOWS_MAX {
            assert_eq!(flows.join(&host.to_string()), FlowId(host));
        }
        assert_eq!((flows.join("one more"), flows.join("7")), (OTHERS, FlowId(7)));
        flows.leave(OTHERS);
        flows.leave(FlowId(9));
        assert_eq!((flows.join("one more"), flows.join("another")), (FlowId(9), OTHERS));
    }
}
