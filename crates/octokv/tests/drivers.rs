//! `octokv serve` where io_uring is refused: said once, served all the same, and a clear answer to who insists.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests start processes and make files"
)]

mod common;

use common::{Server, WITHOUT_IO_URING, directory, refused_to_serve, without_io_uring};
use octokv_sys::seccomp::SeccompErrno;

/// The cores of this machine, as `--cores` takes them.
fn cores() -> String {
    let cores: Vec<String> = octokv_sys::thread::allowed_cores().iter().map(usize::to_string).collect();
    cores.join(",")
}

/// Whether the process has an io_uring open.
fn has_io_uring(server: &Server) -> bool {
    let open = std::fs::read_dir(format!("/proc/{}/fd", server.id())).unwrap();
    open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .any(|link| link.to_string_lossy().contains("io_uring"))
}

#[test]
fn a_node_without_io_uring_warns_once_and_serves() {
    for refusal in [SeccompErrno::Eperm, SeccompErrno::Enosys] {
        let directory = directory();
        let (device, cores) = (directory.path().join("device"), cores());
        let device = device.to_str().unwrap();
        let arguments = ["--device", device, "--size", "64MiB", "--listen", "127.0.0.1:0", "--cores", &cores];
        let mut server = without_io_uring(refusal, || Server::start_with(directory.path(), &arguments));
        server.put("key", "value");
        server.has("key", "value");
        server.kill();
        let said = server.all_said();
        assert_eq!(said.matches(WITHOUT_IO_URING).count(), 1, "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("WARN") && said.contains("worker threads"), "{said}");
        assert!(said.contains(&format!("os error {}", refusal.raw())), "{said}");
        // What was acknowledged is there on either driver.
        let server = Server::start_with(directory.path(), &arguments);
        server.has("key", "value");
        server.stop();
    }
}

#[test]
fn requiring_unavailable_io_uring_fails_with_the_reason_and_the_remedy() {
    let directory = directory();
    let device = directory.path().join("device");
    for (refusal, why) in [(SeccompErrno::Eperm, "forbidden"), (SeccompErrno::Enosys, "no io_uring")] {
        let said = without_io_uring(refusal, || {
            refused_to_serve(&device, &["--size", "64MiB", "--driver", "uring"])
        });
        said.refused(1, &["io_uring", why, "driver \"threads\""]);
        assert_eq!(said.stderr.lines().count(), 1, "{}", said.stderr);
        assert!(!device.exists(), "a node that was refused has made its file");
    }
}

#[test]
fn the_threads_driver_opens_no_ring_and_logs_no_warning() {
    let directory = directory();
    let (device, cores) = (directory.path().join("device"), cores());
    let device = device.to_str().unwrap();
    let common = ["--device", device, "--size", "64MiB", "--listen", "127.0.0.1:0", "--cores", &cores];
    let arguments: Vec<&str> = common.iter().chain(&["--driver", "threads"]).copied().collect();
    let mut server = Server::start_with(directory.path(), &arguments);
    server.put("key", "value");
    assert!(!has_io_uring(&server));
    assert!(server.signal("TERM").success());
    assert_eq!(server.all_said(), "");
    // It is not that rings cannot be seen.
    if octokv_sys::uring::unavailable_errno().is_none() {
        assert!(has_io_uring(&Server::start_with(directory.path(), &common)));
    }
}
