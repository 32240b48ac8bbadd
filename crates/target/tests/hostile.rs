//! Hostile bytes in every state: never a panic, never more memory than the bounds allow.

mod common;

use common::{hostile, target};
use octokv_base::{Nanos, Pool, Random};
use octokv_target::{Connection, Counts};

#[test]
fn scripts_of_sound_and_spoiled_pdus_never_panic_and_lose_no_buffer() {
    let mut done = Counts::default();
    for seed in 0..2000 {
        let mut random = Random::new(seed);
        let mut script = vec![0; 200 + random.below(1500) as usize];
        random.fill(&mut script);
        let result = std::panic::catch_unwind(|| hostile::play(&script));
        let Ok(counts) = result else { panic!("seed {seed}") };
        done.stores += counts.stores;
        done.stored_bytes += counts.stored_bytes;
        done.retrieves += counts.retrieves;
        done.retrieved_bytes += counts.retrieved_bytes;
        done.deletes += counts.deletes;
        done.admin_commands += counts.admin_commands;
        done.digest_errors += counts.digest_errors;
        done.errors += counts.errors;
        done.transport_faults += counts.transport_faults;
    }
    // The scripts must reach what they are for.
    assert!(done.stores > 5000 && done.stored_bytes > 20 << 20, "{done:?}");
    assert!(done.retrieved_bytes > 100_000 && done.deletes > 100, "{done:?}");
    assert!(done.retrieves > 1000 && done.admin_commands > 5000 && done.errors > 5000, "{done:?}");
    assert!(done.digest_errors > 10 && done.transport_faults > 500, "{done:?}");
}

#[test]
fn noise_ends_a_connection_and_is_let_pass() {
    let target = target();
    let pool = Pool::new(1 << 20);
    let mut random = Random::new(1);
    for _ in 0..2000 {
        let address = "127.0.0.1:1".parse().unwrap();
        let mut connection = Connection::new(target.clone(), address, address, Nanos::ZERO);
        let mut noise = vec![0; 1 + random.below(500) as usize];
        random.fill(&mut noise);
        noise[0] %= 12;
        let mut requests = Vec::new();
        connection.receive(Nanos::ZERO, &noise, &pool, &mut requests);
        assert!(requests.is_empty());
        assert!(connection.outbox().bytes() <= 152);
        connection.tick(Nanos::from_secs(11));
        assert!(connection.is_closed());
    }
    assert_eq!(target.connections(), 0);
}
