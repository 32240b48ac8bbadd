//! Starts, stops and control of a node whose threads a test spawns.

use super::*;
use crate::config::DeviceConfig;
use crate::core_roles::CoreRole;
use octokv_runtime::kernel::spawn_thread;
use std::sync::atomic::AtomicUsize;

/// A node on these processors, real or not, in memory.
fn config(cores: &[usize]) -> NodeConfig {
    NodeConfig {
        devices: vec![DeviceConfig::Memory { bytes: 32 << 20, block_bytes: 4096 }],
        listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
        cores: cores.to_vec(),
        ..NodeConfig::default()
    }
}

/// Counts the threads that have not ended.
#[derive(Clone, Default)]
struct RunningThreads(Arc<AtomicUsize>);

impl RunningThreads {
    fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    /// Starts a counted thread on any processor.
    fn spawn(&self, main: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        struct Running(RunningThreads);
        impl Drop for Running {
            fn drop(&mut self) {
                self.0.0.fetch_sub(1, Ordering::AcqRel);
            }
        }
        self.0.fetch_add(1, Ordering::AcqRel);
        let running = Running(self.clone());
        spawn_thread("core", move || {
            let _running = running;
            main();
        })
    }
}

#[test]
fn a_core_whose_thread_is_not_spawned_is_named_and_the_started_ones_are_joined() {
    let threads = RunningThreads::default();
    let mut spawned = Vec::new();
    let started = start_with(config(&[3, 5, 8, 9]), |processor, main| {
        spawned.push(processor);
        if processor == 8 {
            return Err(io::Error::from_raw_os_error(11));
        }
        threads.spawn(main)
    });
    let error = started.err().expect("core 8 cannot start");
    assert!(matches!(error, StartError::Core { core: 8, .. }), "{error}");
    assert!(error.to_string().contains("core 8") && error.to_string().contains("os error 11"), "{error}");
    assert_eq!(spawned, [3, 5, 8], "the core after the failed one is not started");
    assert_eq!(threads.count(), 0, "threads left running");
}

#[test]
fn a_core_that_panics_during_the_start_is_named_and_the_others_are_joined() {
    for panicking in [3, 5, 8] {
        let (threads, cores) = (RunningThreads::default(), [3, 5, 8]);
        let started = start_with(config(&cores), |processor, main| {
            threads.spawn(move || {
                let main = main;
                assert!(processor != panicking, "injected panic of core {processor}");
                main();
            })
        });
        let error = started.err().expect("a core has panicked");
        assert!(matches!(error, StartError::Core { core, .. } if core == panicking), "{error}");
        assert_eq!(threads.count(), 0, "threads left running");
    }
}

#[test]
fn a_node_on_several_cores_starts_and_stops() {
    let threads = RunningThreads::default();
    let node = start_with(config(&[3, 5, 8]), |_, main| threads.spawn(main)).expect("starts");
    assert_eq!(node.addresses().len(), 1);
    assert_eq!(node.core_statuses().len(), 3);
    node.stop().expect("stops cleanly");
    assert_eq!(threads.count(), 0, "threads left running");
}

#[test]
fn cores_for_drives_are_the_first_and_run_on_the_processors_that_were_named() {
    let (threads, mut spawned) = (RunningThreads::default(), Vec::new());
    let drive_cores = vec![8, 5];
    let node = start_with(NodeConfig { drive_cores, ..config(&[3, 5, 9, 8]) }, |processor, main| {
        spawned.push(processor);
        threads.spawn(main)
    });
    let node = node.expect("starts");
    assert_eq!(spawned, [8, 5, 3, 9]);
    assert_eq!(node.processors(), spawned);
    let roles: Vec<_> = node.core_statuses().iter().map(|core| core.role).collect();
    assert_eq!(roles, [CoreRole::Drives, CoreRole::Drives, CoreRole::Network, CoreRole::Network]);
    node.stop().expect("stops cleanly");
}

#[test]
fn concurrent_status_requests_and_changes_stay_within_the_control_queues() {
    let node = start_with(config(&[3, 5]), |_, main| RunningThreads::default().spawn(main));
    let node = Arc::new(node.expect("starts"));
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let node = Arc::clone(&node);
            spawn_thread("status", move || {
                (0..50).for_each(|_| assert_eq!(node.core_statuses().len(), 2));
            })
        })
        .collect();
    let added = NamespaceConfig::blocks_in_memory(NamespaceId(2));
    for _ in 0..20 {
        node.add_namespace(&added).expect("added");
        node.remove_namespace(added.id).expect("removed");
    }
    callers.into_iter().for_each(|caller| caller.expect("spawns").join().expect("every core responds"));
    Arc::into_inner(node).expect("the callers have ended").stop().expect("stops cleanly");
}
