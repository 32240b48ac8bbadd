//! The nodes that `octokv bench` puts load on: one, or with Key Value commands several.
//! In: the URLs. Out: addresses and settings of sessions. What is wrong with several is a usage error, said before
//! anything is connected.

use crate::child_process::address_of;
use crate::cli::{Bench, SystemName};
use crate::exit_status::{Failure, Outcome};
use octokv_bench::{Node, Plan};
use octokv_client::{Settings, Url};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Whether the plan can be dealt among the namespaces.
///
/// # Errors
/// A usage error that says why not.
pub fn check(bench: &Bench, plan: &Plan) -> Outcome {
    let targets = bench.url.len();
    if targets > 1 && bench.system != SystemName::Kv {
        return Err(Failure::Usage("several --url are for --system kv".to_owned()));
    }
    if let Some(url) = twice(&bench.url) {
        return Err(Failure::Usage(format!("--url {url} is given twice")));
    }
    plan.check_targets(targets).map_err(|invalid| Failure::Usage(invalid.to_string()))
}

/// The first that was there before.
fn twice<T: PartialEq>(list: &[T]) -> Option<&T> {
    list.iter().enumerate().find(|(number, one)| list[..*number].contains(one)).map(|(_, one)| one)
}

/// The nodes, in the order in which they were given.
///
/// # Errors
/// When a host has no address, or two URLs are one namespace.
pub fn nodes(bench: &Bench) -> Result<Vec<Node>, Failure> {
    if bench.system == SystemName::HostKvs {
        // An engine over files has no node.
        let nowhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        return Ok(vec![Node { name: String::new(), address: nowhere, client: Settings::default() }]);
    }
    let mut nodes: Vec<Node> = bench.url.iter().map(node).collect::<Result<_, _>>()?;
    for node in &mut nodes {
        node.client.host = bench.host_nqn.clone().unwrap_or_else(|| node.client.host.clone());
    }
    let places: Vec<_> =
        nodes.iter().map(|node| (node.address, &node.client.subsystem, node.client.namespace)).collect();
    match twice(&places) {
        Some((address, ..)) => {
            Err(Failure::Usage(format!("--url: two of them are one namespace, at {address}")))
        }
        None => Ok(nodes),
    }
}

/// The node of one namespace.
///
/// # Errors
/// When its host has no address.
pub fn node(url: &Url) -> Result<Node, Failure> {
    Ok(Node { name: url.to_string(), address: address_of(url)?, client: client_settings(url) })
}

/// Settings of a session with a namespace.
pub fn client_settings(url: &Url) -> Settings {
    Settings { subsystem: url.subsystem.clone(), namespace: url.namespace, ..Settings::default() }
}
