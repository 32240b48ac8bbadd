//! `octokv ns`, `octokv compact`, `octokv host`, `octokv ana`: changes a running node through its admin socket.

use crate::engine_arg::EngineArg;
use crate::exit_status::{CliError, CliResult};
use crate::size::Size;
use anyhow::anyhow;
use clap::{Args, Subcommand, ValueEnum};
use octokv_admin::DeviceNames;
use octokv_admin::api_types::{
    AddDevice, AddNamespace, AnaGroupStatus, ExistingDataMode, NamespaceSummary, NamespaceType,
    ReplaceDevice, SetAnaState,
};
use octokv_admin::http_client::{self, AdminClientError, encode_path_segment};
use std::io::Write;
use std::path::PathBuf;

/// Selects the node and the output format.
#[derive(Debug, Args)]
pub struct AdminArgs {
    /// The node's admin socket [default: that of the node on port 4420, /run/octokv/4420.sock for root, else under
    /// $XDG_RUNTIME_DIR].
    #[arg(long, env = "OCTOKV_ADMIN", value_name = "SOCKET")]
    pub admin: Option<PathBuf>,
    /// Print the result as a JSON document.
    #[arg(long)]
    pub json: bool,
}

/// Namespaces.
#[derive(Debug, Subcommand)]
pub enum NsCommand {
    /// Add a namespace, now and after every restart; connected hosts are notified.
    Add(NsAddArgs),
    /// Replace a lost device of a namespace on several, while the others are served. The keys that it held are given up.
    Replace(NsReplaceArgs),
    /// Add a device to a namespace on several, while it is served. Its part of the keys then moves to it, paced.
    Extend(NsExtendArgs),
    /// Remove a namespace that was added at run time; the data stays on its device.
    Remove {
        /// Namespace ID.
        nsid: u32,
        #[command(flatten)]
        admin_args: AdminArgs,
    },
    /// Print all namespaces, one per line, offline ones included.
    List {
        #[command(flatten)]
        admin_args: AdminArgs,
    },
}

/// Command set of a namespace.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum NamespaceKindArg {
    /// Keys and values.
    Kv,
    /// Logical blocks.
    Block,
}

/// Arguments of `ns add`.
#[derive(Debug, Args)]
pub struct NsAddArgs {
    /// Command set of the namespace.
    #[arg(long)]
    pub kind: NamespaceKindArg,
    /// A file, a block device, or "memory"; a missing file is created if --size is given. Several, each with this flag, hold a part of the keys
    /// of a key-value namespace each.
    #[arg(long, value_name = "PATH", required = true)]
    pub device: Vec<String>,
    /// Size of each missing file or memory; an existing device keeps its size.
    #[arg(long)]
    pub size: Option<Size>,
    /// Key-value namespaces: storage engine [default: the node's].
    #[arg(long)]
    pub engine: Option<EngineArg>,
    /// Key-value namespaces: memory of a cache of values [default: 0, none].
    #[arg(long, value_name = "SIZE")]
    pub cache_bytes: Option<Size>,
    /// Key-value namespaces on a file: never-written space that is written ahead of its use; 0 for none [default: 1GiB].
    #[arg(long, value_name = "SIZE")]
    pub prepare_bytes: Option<Size>,
    /// Key-value namespaces on several devices, engines hash and log: space of each device for values of overloaded others [default: 0, none].
    #[arg(long, value_name = "SIZE")]
    pub swap_bytes: Option<Size>,
    /// Block namespaces: block size in bytes, 512 or 4096 [default: 4096].
    #[arg(long, value_name = "BYTES")]
    pub block_size: Option<Size>,
    /// Namespace ID, 1 to 1024 [default: the lowest free one].
    #[arg(long)]
    pub nsid: Option<u32>,
    /// ANA group, 1 to 32 [default: 1].
    #[arg(long, value_name = "GROUP")]
    pub ana_group: Option<u32>,
    /// Discard the data on the device: a key-value namespace is formatted, from a block namespace a key-value volume is
    /// erased.
    #[arg(long, conflicts_with = "keep")]
    pub format: bool,
    /// Block namespaces: expose the data on the device, even a key-value volume.
    #[arg(long)]
    pub keep: bool,
    #[command(flatten)]
    pub admin_args: AdminArgs,
}

/// Arguments of `ns replace`.
#[derive(Debug, Args)]
pub struct NsReplaceArgs {
    /// Namespace ID.
    pub nsid: u32,
    /// The device that is lost, as `octokv ns list` names it: what it holds is given up, and it is refused from now on.
    #[arg(long, value_name = "PATH")]
    pub lost: String,
    /// The file or block device in its place, which begins without keys; a missing file is created if --size is given.
    #[arg(long, value_name = "PATH")]
    pub device: String,
    /// Size of a missing file; an existing device keeps its size.
    #[arg(long)]
    pub size: Option<Size>,
    /// Discard the data on the new device.
    #[arg(long)]
    pub format: bool,
    #[command(flatten)]
    pub admin_args: AdminArgs,
}

/// Arguments of `ns extend`.
#[derive(Debug, Args)]
pub struct NsExtendArgs {
    /// Namespace ID.
    pub nsid: u32,
    /// The file or block device that is added; a missing file is created if --size is given.
    #[arg(long, value_name = "PATH")]
    pub device: String,
    /// Size of a missing file; an existing device keeps its size.
    #[arg(long)]
    pub size: Option<Size>,
    /// Take a device that existed before, and discard what it holds: needed for every block device.
    #[arg(long)]
    pub format: bool,
    #[command(flatten)]
    pub admin_args: AdminArgs,
}

/// Arguments of `compact`.
#[derive(Debug, Args)]
pub struct CompactArgs {
    /// Namespace ID.
    #[arg(default_value_t = 1)]
    pub nsid: u32,
    #[command(flatten)]
    pub admin_args: AdminArgs,
}

/// Access control by host NQN.
#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// Allow a host to connect, or every host.
    Allow {
        /// The host's NQN, or "any".
        nqn: String,
        #[command(flatten)]
        admin_args: AdminArgs,
    },
    /// Remove a host, or "any", from the list; hosts no longer allowed are disconnected.
    Deny {
        /// The host's NQN, or "any".
        nqn: String,
        #[command(flatten)]
        admin_args: AdminArgs,
    },
    /// Print the list, one NQN per line; "any" stands for every host.
    List {
        #[command(flatten)]
        admin_args: AdminArgs,
    },
}

/// ANA groups (asymmetric namespace access).
#[derive(Debug, Subcommand)]
pub enum AnaCommand {
    /// Set the access state that hosts see for a group's namespaces.
    Set {
        /// The group, 1 to 32.
        group: u32,
        /// optimized, non-optimized, inaccessible, persistent-loss or change.
        state: String,
        #[command(flatten)]
        admin_args: AdminArgs,
    },
    /// Print the groups and their states, one per line.
    List {
        #[command(flatten)]
        admin_args: AdminArgs,
    },
}

/// The default admin socket of a node on this port; `None` if the user has no runtime directory.
pub fn default_admin_socket(port: u16) -> Option<PathBuf> {
    let directory = match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if octokv_sys::process::is_root() => PathBuf::from("/run"),
        Some(directory) if !directory.is_empty() => directory.into(),
        _ => return None,
    };
    Some(directory.join("octokv").join(format!("{port}.sock")))
}

impl AdminArgs {
    /// The socket path given or the default one.
    ///
    /// # Errors
    /// A usage error without either.
    pub fn socket_path(&self) -> Result<PathBuf, CliError> {
        let default = || default_admin_socket(octokv_node::config::DEFAULT_PORT);
        let none = || CliError::Usage("--admin SOCKET is required: XDG_RUNTIME_DIR is not set".to_owned());
        self.admin.clone().or_else(default).ok_or_else(none)
    }
}

/// Maps an invalid request to a usage error.
pub fn to_cli_error(error: AdminClientError) -> CliError {
    match error {
        AdminClientError::Status(400, why) => CliError::Usage(why),
        other => CliError::Failed(anyhow!("{other}")),
    }
}

/// Runs `octokv ns`.
///
/// # Errors
/// The node's error, or an unreachable node.
pub fn ns(command: &NsCommand) -> CliResult {
    match command {
        NsCommand::Add(add) => {
            let request = AddNamespace {
                nsid: add.nsid,
                kind: match add.kind {
                    NamespaceKindArg::Kv => NamespaceType::Kv,
                    NamespaceKindArg::Block => NamespaceType::Block,
                },
                device: DeviceNames::new(add.device.clone()).absolute().map_err(CliError::Usage)?,
                size_bytes: add.size.map(|size| size.0),
                engine: add.engine.map(|engine| engine.0.name().to_owned()),
                cache_bytes: add.cache_bytes.map(|size| size.0),
                prepare_bytes: add.prepare_bytes.map(|size| size.0),
                swap_bytes: add.swap_bytes.map(|size| size.0),
                block_bytes: add.block_size.map(|size| size.0.try_into().unwrap_or(u32::MAX)),
                ana_group: add.ana_group,
                existing: match (add.format, add.keep) {
                    (true, _) => ExistingDataMode::GiveUp,
                    (_, true) => ExistingDataMode::Keep,
                    _ => ExistingDataMode::Check,
                },
            };
            let socket = add.admin_args.socket_path()?;
            let added: NamespaceSummary =
                http_client::post(&socket, "/v1/namespaces", &request).map_err(to_cli_error)?;
            if add.admin_args.json { print_json(&added) } else { print_namespaces(&[added]) }
        }
        NsCommand::Replace(replace) => {
            let request = ReplaceDevice {
                lost: replace.lost.clone(),
                device: absolute_device(&replace.device)?,
                size_bytes: replace.size.map(|size| size.0),
                discard: replace.format,
            };
            let path = format!("/v1/namespaces/{}/replace", replace.nsid);
            let socket = replace.admin_args.socket_path()?;
            let replaced: NamespaceSummary =
                http_client::post(&socket, &path, &request).map_err(to_cli_error)?;
            if !replaced.added {
                eprintln!(
                    "namespace {} is of the configuration: name {} there in the place of {} before the next start",
                    replace.nsid, request.device, request.lost
                );
            }
            if replace.admin_args.json { print_json(&replaced) } else { print_namespaces(&[replaced]) }
        }
        NsCommand::Extend(extend) => {
            let request = AddDevice {
                device: absolute_device(&extend.device)?,
                size_bytes: extend.size.map(|size| size.0),
                discard: extend.format,
            };
            let path = format!("/v1/namespaces/{}/extend", extend.nsid);
            let socket = extend.admin_args.socket_path()?;
            let extended: NamespaceSummary =
                http_client::post(&socket, &path, &request).map_err(to_cli_error)?;
            if !extended.added {
                eprintln!(
                    "namespace {} is of the configuration: add {} to its devices there before the next start, or it will not open",
                    extend.nsid, request.device
                );
            }
            if extend.admin_args.json { print_json(&extended) } else { print_namespaces(&[extended]) }
        }
        NsCommand::Remove { nsid, admin_args } => {
            http_client::delete(&admin_args.socket_path()?, &format!("/v1/namespaces/{nsid}"))
                .map_err(to_cli_error)
        }
        NsCommand::List { admin_args } => {
            let all: Vec<NamespaceSummary> =
                http_client::get(&admin_args.socket_path()?, "/v1/namespaces").map_err(to_cli_error)?;
            if admin_args.json { print_json(&all) } else { print_namespaces(&all) }
        }
    }
}

/// The absolute path of a device, for a node that has another working directory.
///
/// # Errors
/// There is none, or it is not UTF-8.
fn absolute_device(device: &str) -> anyhow::Result<String> {
    let path = std::path::absolute(device).map_err(|error| anyhow!("device: {error}"))?;
    Ok(path.to_str().ok_or_else(|| anyhow!("device: the path is not UTF-8"))?.to_owned())
}

/// Prints a JSON document.
///
/// # Errors
/// If the output cannot be written.
pub fn print_json(value: &impl serde::Serialize) -> CliResult {
    let text = serde_json::to_string_pretty(value).map_err(|error| anyhow!("{error}"))?;
    Ok(writeln!(std::io::stdout(), "{text}")?)
}

fn print_namespaces(all: &[NamespaceSummary]) -> CliResult {
    let mut out = std::io::stdout().lock();
    for one in all {
        let what = match (&one.engine, one.block_bytes, one.keys) {
            (_, Some(bytes), _) => format!("blocks of {bytes} B"),
            (Some(engine), _, Some(keys)) => format!("{engine}, {keys} keys"),
            (Some(engine), ..) => engine.clone(),
            _ => String::new(),
        };
        let kind = match one.kind {
            NamespaceType::Kv => "kv",
            NamespaceType::Block => "block",
        };
        let (size, from) = (Size(one.size_bytes).to_string(), if one.added { "added" } else { "configured" });
        write!(out, "{:<5} {kind:<6} {size:>10}  {what:<18} group {:<3} ", one.nsid, one.ana_group)?;
        write!(out, "{from:<11} {}", one.device)?;
        match &one.offline {
            Some(why) => writeln!(out, "  NOT SERVED: {why}")?,
            None => writeln!(out)?,
        }
        for device in &one.devices {
            let state = match (&device.failure, device.read_only) {
                (Some(why), _) => format!("NOT AVAILABLE: {why}"),
                (None, true) => "READ-ONLY: a write failed".to_owned(),
                (None, false) => format!("{} keys", device.keys),
            };
            writeln!(
                out,
                "      device {:<3} {:>10}  {}  {state}",
                device.index,
                Size(device.size_bytes).to_string(),
                device.device
            )?;
        }
    }
    Ok(())
}

/// Runs `octokv compact`.
///
/// # Errors
/// The node's error, or an unreachable node.
pub fn compact(arguments: &CompactArgs) -> CliResult {
    let CompactArgs { nsid, admin_args } = arguments;
    let path = format!("/v1/namespaces/{nsid}/compact");
    let compacted: NamespaceSummary =
        http_client::run(&admin_args.socket_path()?, &path).map_err(to_cli_error)?;
    if admin_args.json { print_json(&compacted) } else { print_namespaces(&[compacted]) }
}

/// Runs `octokv host`.
///
/// # Errors
/// The node's error, or an unreachable node.
pub fn host(command: &HostCommand) -> CliResult {
    let path = |nqn: &str| format!("/v1/hosts/{}", encode_path_segment(nqn));
    match command {
        HostCommand::Allow { nqn, admin_args } => {
            http_client::put(&admin_args.socket_path()?, &path(nqn), None::<&()>).map_err(to_cli_error)
        }
        HostCommand::Deny { nqn, admin_args } => {
            http_client::delete(&admin_args.socket_path()?, &path(nqn)).map_err(to_cli_error)
        }
        HostCommand::List { admin_args } => {
            let names: Vec<String> =
                http_client::get(&admin_args.socket_path()?, "/v1/hosts").map_err(to_cli_error)?;
            if admin_args.json {
                return print_json(&names);
            }
            let mut out = std::io::stdout().lock();
            Ok(names.iter().try_for_each(|name| writeln!(out, "{name}"))?)
        }
    }
}

/// Runs `octokv ana`.
///
/// # Errors
/// The node's error, or an unreachable node.
pub fn ana(command: &AnaCommand) -> CliResult {
    match command {
        AnaCommand::Set { group, state, admin_args } => {
            let change = SetAnaState { state: state.clone() };
            http_client::put(&admin_args.socket_path()?, &format!("/v1/ana/{group}"), Some(&change))
                .map_err(to_cli_error)
        }
        AnaCommand::List { admin_args } => {
            let groups: Vec<AnaGroupStatus> =
                http_client::get(&admin_args.socket_path()?, "/v1/ana").map_err(to_cli_error)?;
            if admin_args.json {
                return print_json(&groups);
            }
            let mut out = std::io::stdout().lock();
            Ok(groups.iter().try_for_each(|one| writeln!(out, "{:<3} {}", one.group, one.state))?)
        }
    }
}
