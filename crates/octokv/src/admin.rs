//! `octokv ns`, `octokv host`, `octokv ana`: changing a node that runs, through its administration socket.

use crate::exit_status::{CliError, CliResult};
use crate::size::Size;
use anyhow::anyhow;
use clap::{Args, Subcommand, ValueEnum};
use octokv_admin::api_types::{
    AddNamespace, AnaGroupStatus, ExistingDataMode, NamespaceSummary, NamespaceType, SetAnaState,
};
use octokv_admin::http_client::{self, AdminClientError, encode_path_segment};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Where a node is looked for.
#[derive(Debug, Args)]
pub struct AdminArgs {
    /// The node's administration socket [default: that of the node on port 4420, /run/octokv/4420.sock for root, else
    /// under $XDG_RUNTIME_DIR].
    #[arg(long, env = "OCTOKV_ADMIN", value_name = "SOCKET")]
    pub admin: Option<PathBuf>,
    /// Print what is listed or added as a JSON document.
    #[arg(long)]
    pub json: bool,
}

/// Namespaces.
#[derive(Debug, Subcommand)]
pub enum NsCommand {
    /// Serve one more namespace, now and after every restart; connected hosts hear of it.
    Add(NsAddArgs),
    /// Serve a namespace no more; its device keeps what it holds.
    Remove {
        /// Its identifier.
        nsid: u32,
        #[command(flatten)]
        admin_args: AdminArgs,
    },
    /// Print the namespaces, one per line, those that are not served too.
    List {
        #[command(flatten)]
        admin_args: AdminArgs,
    },
}

/// What a namespace is made of.
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
    /// What it is made of.
    #[arg(long)]
    pub kind: NamespaceKindArg,
    /// A file, a block device, or "memory"; a missing file is created where a size is given.
    #[arg(long, value_name = "PATH")]
    pub device: String,
    /// How large a missing file, or memory, is made; what exists keeps its size.
    #[arg(long)]
    pub size: Option<Size>,
    /// Bytes of a block, for blocks: 512 or 4096 [default: 4096].
    #[arg(long, value_name = "BYTES")]
    pub block_size: Option<Size>,
    /// Its identifier, 1 to 1024 [default: the lowest free one].
    #[arg(long)]
    pub nsid: Option<u32>,
    /// Its group of asymmetric access, 1 to 32 [default: 1].
    #[arg(long, value_name = "GROUP")]
    pub ana_group: Option<u32>,
    /// Give up what the device holds: for keys it is formatted, for blocks a volume of keys is wiped out.
    #[arg(long, conflicts_with = "keep")]
    pub format: bool,
    /// For blocks: serve the device as it is, even where it holds a volume of keys.
    #[arg(long)]
    pub keep: bool,
    #[command(flatten)]
    pub admin_args: AdminArgs,
}

/// Who may connect.
#[derive(Debug, Subcommand)]
pub enum HostCommand {
    /// Let a host connect, or any.
    Allow {
        /// The host's NQN, or "any".
        nqn: String,
        #[command(flatten)]
        admin_args: AdminArgs,
    },
    /// Let a host connect no more, or no longer any; those that may not are disconnected.
    Deny {
        /// The host's NQN, or "any".
        nqn: String,
        #[command(flatten)]
        admin_args: AdminArgs,
    },
    /// Print who may connect, one per line; "any" stands for every host.
    List {
        #[command(flatten)]
        admin_args: AdminArgs,
    },
}

/// Groups of asymmetric namespace access.
#[derive(Debug, Subcommand)]
pub enum AnaCommand {
    /// Tell hosts how well a group's namespaces are reached here.
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

/// The administration socket of a node on this port, where this user may have one.
pub fn default_admin_socket(port: u16) -> Option<PathBuf> {
    let directory = match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if octokv_sys::process::is_root() => PathBuf::from("/run"),
        Some(directory) if !directory.is_empty() => directory.into(),
        _ => return None,
    };
    Some(directory.join("octokv").join(format!("{port}.sock")))
}

impl AdminArgs {
    /// Where the node is asked.
    pub fn socket_path(&self) -> Result<PathBuf, CliError> {
        let default = || default_admin_socket(octokv_node::config::DEFAULT_PORT);
        let none = || CliError::Usage("--admin SOCKET is needed: there is no XDG_RUNTIME_DIR".to_owned());
        self.admin.clone().or_else(default).ok_or_else(none)
    }
}

/// What a refusal means to who typed the command.
pub fn to_cli_error(error: AdminClientError) -> CliError {
    match error {
        AdminClientError::Status(400, why) => CliError::Usage(why),
        other => CliError::Failed(anyhow!("{other}")),
    }
}

/// Runs `octokv ns`.
pub fn ns(command: &NsCommand) -> CliResult {
    match command {
        NsCommand::Add(add) => {
            let request = AddNamespace {
                nsid: add.nsid,
                kind: match add.kind {
                    NamespaceKindArg::Kv => NamespaceType::Kv,
                    NamespaceKindArg::Block => NamespaceType::Block,
                },
                device: absolute_path(&add.device)?,
                size_bytes: add.size.map(|size| size.0),
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
        NsCommand::Remove { nsid, admin_args: at } => {
            http_client::delete(&at.socket_path()?, &format!("/v1/namespaces/{nsid}")).map_err(to_cli_error)
        }
        NsCommand::List { admin_args: at } => {
            let all: Vec<NamespaceSummary> =
                http_client::get(&at.socket_path()?, "/v1/namespaces").map_err(to_cli_error)?;
            if at.json { print_json(&all) } else { print_namespaces(&all) }
        }
    }
}

/// The node has a directory of its own.
fn absolute_path(device: &str) -> Result<String, CliError> {
    if device == crate::config::MEMORY_DEVICE || device.is_empty() {
        return Ok(device.to_owned());
    }
    let path = std::path::absolute(Path::new(device))?;
    path.into_os_string().into_string().map_err(|_| CliError::Usage("--device: no UTF-8".to_owned()))
}

/// Prints a JSON document.
pub fn print_json(value: &impl serde::Serialize) -> CliResult {
    let text = serde_json::to_string_pretty(value).map_err(|error| anyhow!("{error}"))?;
    Ok(writeln!(std::io::stdout(), "{text}")?)
}

fn print_namespaces(all: &[NamespaceSummary]) -> CliResult {
    let mut out = std::io::stdout().lock();
    for one in all {
        let what = match (one.kind, one.block_bytes, one.keys) {
            (NamespaceType::Block, Some(bytes), _) => format!("blocks of {bytes} B"),
            (_, _, Some(keys)) => format!("{keys} keys"),
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
    }
    Ok(())
}

/// Runs `octokv host`.
pub fn host(command: &HostCommand) -> CliResult {
    let path = |nqn: &str| format!("/v1/hosts/{}", encode_path_segment(nqn));
    match command {
        HostCommand::Allow { nqn, admin_args: at } => {
            http_client::put(&at.socket_path()?, &path(nqn), None::<&()>).map_err(to_cli_error)
        }
        HostCommand::Deny { nqn, admin_args: at } => {
            http_client::delete(&at.socket_path()?, &path(nqn)).map_err(to_cli_error)
        }
        HostCommand::List { admin_args: at } => {
            let names: Vec<String> =
                http_client::get(&at.socket_path()?, "/v1/hosts").map_err(to_cli_error)?;
            if at.json {
                return print_json(&names);
            }
            let mut out = std::io::stdout().lock();
            Ok(names.iter().try_for_each(|name| writeln!(out, "{name}"))?)
        }
    }
}

/// Runs `octokv ana`.
pub fn ana(command: &AnaCommand) -> CliResult {
    match command {
        AnaCommand::Set { group, state, admin_args: at } => {
            let change = SetAnaState { state: state.clone() };
            http_client::put(&at.socket_path()?, &format!("/v1/ana/{group}"), Some(&change))
                .map_err(to_cli_error)
        }
        AnaCommand::List { admin_args: at } => {
            let groups: Vec<AnaGroupStatus> =
                http_client::get(&at.socket_path()?, "/v1/ana").map_err(to_cli_error)?;
            if at.json {
                return print_json(&groups);
            }
            let mut out = std::io::stdout().lock();
            Ok(groups.iter().try_for_each(|one| writeln!(out, "{:<3} {}", one.group, one.state))?)
        }
    }
}
