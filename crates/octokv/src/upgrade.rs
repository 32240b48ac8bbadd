//! `octokv upgrade`: makes a volume one of its engine's newest format.

use crate::check::path_names;
use crate::cli::UpgradeArgs;
use crate::exit_status::CliResult;
use anyhow::anyhow;

/// Runs `octokv upgrade`.
///
/// # Errors
/// The device does not open, is in use, holds no volume, or a damaged one. The volume is then what it was.
pub fn run(upgrade: &UpgradeArgs) -> CliResult {
    let device = path_names(&upgrade.device);
    let upgraded = octokv_node::upgrade_devices(&upgrade.device).map_err(|error| anyhow!("{error}"))?;
    let versions = upgraded.map_err(|error| anyhow!("device {device}: {error}"))?;
    match versions.before == versions.after {
        true => println!("device {device}: format {} is the newest", versions.before),
        false => println!("device {device}: upgraded from format {} to {}", versions.before, versions.after),
    }
    Ok(())
}
