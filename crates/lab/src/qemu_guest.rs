//! An emulated qemu guest with Debian's kernel. The scripts of `guest/` are embedded in the binary and unpacked for a
//! run; their dependencies on this machine are checked first.

use crate::octokv_binary::octokv_binary;
use anyhow::{Context, Result, bail};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The scripts: name, text, whether it is executable.
const GUEST_SCRIPTS: [(&str, &str, bool); 6] = [
    ("boot", include_str!("../../../guest/boot"), true),
    ("make-initramfs", include_str!("../../../guest/make-initramfs"), true),
    ("init", include_str!("../../../guest/init"), true),
    ("lib.sh", include_str!("../../../guest/lib.sh"), false),
    ("netkvs.sh", include_str!("../../../guest/netkvs.sh"), false),
    ("host-kvs.sh", include_str!("../../../guest/host-kvs.sh"), false),
];
/// The task of a guest.
#[derive(Clone, Copy, Debug)]
pub struct GuestTask {
    /// Name of the script that it runs.
    pub script: &'static str,
    /// Programs that its initramfs contains besides.
    pub programs: &'static [&'static str],
}

/// A guest that is unpacked and not booted.
pub struct QemuGuest {
    directory: PathBuf,
    task: GuestTask,
}

impl QemuGuest {
    /// Unpacks the scripts into a directory.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn unpack(directory: &Path, task: GuestTask) -> Result<QemuGuest> {
        let directory = directory.join("guest");
        fs::create_dir(&directory).context("a directory for the guest's scripts")?;
        for (name, text, is_program) in GUEST_SCRIPTS {
            let path = directory.join(name);
            fs::write(&path, text).with_context(|| format!("the guest's script {name}"))?;
            if is_program {
                fs::set_permissions(&path, fs::Permissions::from_mode(0o755))
                    .context("the guest's scripts")?;
            }
        }
        Ok(QemuGuest { directory, task })
    }

    /// The missing dependencies on this machine, in one line; `None` if there are none.
    ///
    /// # Errors
    /// If the check fails.
    pub fn missing_dependencies(&self) -> Result<Option<String>> {
        let mut boot = Command::new(self.directory.join("boot"));
        boot.arg("--check");
        for program in self.task.programs {
            boot.args(["--program", program]);
        }
        let output = match boot.stdin(Stdio::null()).output() {
            Ok(output) => output,
            Err(error) => return Ok(Some(format!("bash (package bash): {error}"))),
        };
        let lines: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
        match output.status.code() {
            Some(0) => Ok(None),
            Some(3) if !lines.is_empty() => Ok(Some(lines.join(", "))),
            _ => {
                bail!(
                    "the check of the guest's dependencies failed: {}",
                    String::from_utf8_lossy(&output.stderr).trim()
                )
            }
        }
    }

    /// Boots the guest with its script and these variables, and returns its console, also of a failed run. The guest is
    /// terminated after `limit_s` seconds.
    ///
    /// # Errors
    /// If the guest does not start.
    pub fn boot(&self, variables: &[(&str, String)], limit_s: u64) -> Result<String> {
        // The guest expects this name, independent of the name and path of this program.
        let binary = self.directory.join("octokv");
        symlink(octokv_binary()?, &binary).context("the guest's octokv")?;
        let log = self.directory.join("console");
        let mut boot = Command::new(self.directory.join("boot"));
        boot.arg("--script").arg(self.directory.join(self.task.script)).arg("--log").arg(&log);
        boot.args(["--memory", "1536", "--module", "ext4", "--limit", &limit_s.to_string()]);
        for program in self.task.programs {
            boot.args(["--program", program]);
        }
        boot.arg("--program").arg(&binary);
        boot.args(variables.iter().map(|(name, value)| format!("{name}={value}")));
        // After a failure it prints the console, which is in the log as well.
        let output = boot.stdin(Stdio::null()).output().context("the guest cannot be booted")?;
        let console = fs::read_to_string(&log).unwrap_or_default();
        if console.is_empty() {
            bail!("the guest did not start: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(console)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_scripts_are_unpacked_and_executable() {
        let directory = tempfile::tempdir().unwrap();
        let task = GuestTask { script: "netkvs.sh", programs: &["db_bench", "mkfs.ext4"] };
        let guest = QemuGuest::unpack(directory.path(), task).unwrap();
        for (name, text, is_program) in GUEST_SCRIPTS {
            let path = guest.directory.join(name);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o111 != 0, is_program, "{name}");
            assert_eq!(text.starts_with("#!"), is_program, "{name}");
        }
        assert!(guest.missing_dependencies().is_ok());
    }
}
