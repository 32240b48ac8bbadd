//! `octokv serve` without io_uring: one warning, full service on threads, an error with `--driver uring`.

use crate::common::{
    IO_URING_UNAVAILABLE, Server, serve_expecting_failure, temp_directory, without_io_uring,
};
use octokv_sys::seccomp::SeccompErrno;

/// The cores of this machine in the format of `--cores`.
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
        let directory = temp_directory();
        let (device, cores) = (directory.path().join("device"), cores());
        let device = device.to_str().unwrap();
        let arguments = ["--device", device, "--size", "64MiB", "--listen", "127.0.0.1:0", "--cores", &cores];
        let mut server = without_io_uring(refusal, || Server::start_with(directory.path(), &arguments));
        server.put("key", "value");
        server.assert_value("key", "value");
        server.kill();
        let output = server.stderr_text();
        assert_eq!(output.matches(IO_URING_UNAVAILABLE).count(), 1, "{output}");
        assert_eq!(output.lines().count(), 1, "{output}");
        assert!(output.contains("WARN") && output.contains("worker threads"), "{output}");
        assert!(output.contains(&format!("os error {}", refusal.raw())), "{output}");
        // Acknowledged data is there with either driver.
        let server = Server::start_with(directory.path(), &arguments);
        server.assert_value("key", "value");
        server.stop();
    }
}

#[test]
fn requiring_unavailable_io_uring_fails_with_the_reason_and_the_remedy() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    for (refusal, why) in [(SeccompErrno::Eperm, "forbidden"), (SeccompErrno::Enosys, "no io_uring")] {
        let output = without_io_uring(refusal, || {
            serve_expecting_failure(&device, &["--size", "64MiB", "--driver", "uring"])
        });
        output.assert_failed(1, &["io_uring", why, "driver \"threads\""]);
        assert_eq!(output.stderr.lines().count(), 1, "{}", output.stderr);
        assert!(!device.exists(), "a node that was refused has made its file");
    }
}

#[test]
fn the_threads_driver_opens_no_ring_and_logs_no_warning() {
    let directory = temp_directory();
    let (device, cores) = (directory.path().join("device"), cores());
    let device = device.to_str().unwrap();
    let common = ["--device", device, "--size", "64MiB", "--listen", "127.0.0.1:0", "--cores", &cores];
    let arguments: Vec<&str> = common.iter().chain(&["--driver", "threads"]).copied().collect();
    let mut server = Server::start_with(directory.path(), &arguments);
    server.put("key", "value");
    assert!(!has_io_uring(&server));
    assert!(server.signal("TERM").success());
    assert_eq!(server.stderr_text(), "");
    // Shows that an open ring would be visible.
    if octokv_sys::uring::unavailable_errno().is_none() {
        assert!(has_io_uring(&Server::start_with(directory.path(), &common)));
    }
}
