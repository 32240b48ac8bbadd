//! The nodes under load of `octokv bench`: one, or several with key-value commands. In: the URLs. Out: addresses and
//! session configurations. Invalid combinations are usage errors before anything is connected.

use crate::cli::{BenchArgs, SystemArg};
use crate::exit_status::{CliError, CliResult};
use octokv_bench::server_process::resolve_address;
use octokv_bench::{BenchConfig, TargetNode};
use octokv_client::{ClientConfig, Url};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Checks that the load can be divided among the namespaces.
///
/// # Errors
/// A usage error with the flag.
pub fn check(bench: &BenchArgs, config: &BenchConfig) -> CliResult {
    let targets = bench.url.len();
    if targets > 1 && bench.system != SystemArg::Kv {
        return Err(CliError::Usage("several --url are for --system kv".to_owned()));
    }
    if bench.tolerate_errors && bench.system != SystemArg::Kv {
        return Err(CliError::Usage("--tolerate-errors is for --system kv".to_owned()));
    }
    if let Some(url) = first_duplicate(&bench.url) {
        return Err(CliError::Usage(format!("--url {url} is given twice")));
    }
    config.validate_targets(targets).map_err(|invalid| CliError::Usage(invalid.to_string()))
}

/// The first element that equals an earlier one.
fn first_duplicate<T: PartialEq>(list: &[T]) -> Option<&T> {
    list.iter().enumerate().find(|(number, one)| list[..*number].contains(one)).map(|(_, one)| one)
}

/// The nodes in the order of the URLs.
///
/// # Errors
/// A host without an address, or two URLs of the same namespace.
pub fn nodes(bench: &BenchArgs) -> Result<Vec<TargetNode>, CliError> {
    if matches!(bench.system, SystemArg::HostKvs | SystemArg::LocalEngine | SystemArg::RocksDb) {
        // An engine on files or a local device has no node.
        let nowhere = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        return Ok(vec![TargetNode {
            name: String::new(),
            address: nowhere,
            client: ClientConfig::default(),
        }]);
    }
    let mut nodes: Vec<TargetNode> = bench.url.iter().map(node).collect::<Result<_, _>>()?;
    for node in &mut nodes {
        node.client.flow_control = bench.flow_control;
        node.client.host_nqn = bench.host_nqn.clone().unwrap_or_else(|| node.client.host_nqn.clone());
    }
    let locations: Vec<_> =
        nodes.iter().map(|node| (node.address, &node.client.subsystem_nqn, node.client.namespace)).collect();
    match first_duplicate(&locations) {
        Some((address, ..)) => {
            Err(CliError::Usage(format!("--url: two of them are the same namespace, at {address}")))
        }
        None => Ok(nodes),
    }
}

/// The node of one namespace.
///
/// # Errors
/// A host without an address.
pub fn node(url: &Url) -> Result<TargetNode, CliError> {
    Ok(TargetNode { name: url.to_string(), address: resolve_address(url)?, client: session_config(url) })
}

/// Session configuration of a namespace.
pub fn session_config(url: &Url) -> ClientConfig {
    ClientConfig { subsystem_nqn: url.subsystem.clone(), namespace: url.namespace, ..ClientConfig::default() }
}
