//! Adversarial bytes in every state: no panic, and no more memory than the limits allow.

use crate::common::{adversary, target};
use octokv_base::{BufferPool, Nanos, Prng};
use octokv_nvmf::{Connection, SharedCounters};

#[test]
fn scripts_of_valid_and_corrupted_pdus_never_panic_or_leak() {
    let (totals, mut at_once) = (SharedCounters::default(), 0);
    for seed in 0..10_000 {
        let mut random = Prng::new(seed);
        let mut script = vec![0; 100 + random.below(700) as usize];
        random.fill(&mut script);
        let result = std::panic::catch_unwind(|| adversary::run_script(&script));
        let Ok((mut counters, completed)) = result else { panic!("seed {seed}") };
        at_once += completed;
        totals.add_and_reset(&mut counters);
    }
    let total = totals.snapshot();
    // The scripts must reach the code that they target.
    assert!(total.stores > 2000 && total.stored_bytes > 4 << 20, "{total:?}");
    assert!(total.retrieves > 2000 && total.retrieved_bytes > 10_000 && total.deletes > 1000, "{total:?}");
    assert!(total.block_writes > 500 && total.written_bytes > 2 << 20, "{total:?}");
    assert!(total.block_reads > 2000 && total.read_bytes > 4 << 20, "{total:?}");
    assert!(total.block_checks > 500 && total.block_zeroes > 500 && total.deallocations > 200, "{total:?}");
    assert!(total.admin_commands > 50_000 && total.errors > 50_000 && total.media_errors > 200, "{total:?}");
    assert!(total.digest_errors > 50 && total.transport_faults > 2000, "{total:?}");
    assert!(total.keep_alive_expired > 20, "{total:?}");
    assert!(at_once > 4_000, "{at_once} commands were completed at once");
}

#[test]
fn random_bytes_close_the_connection_without_requests() {
    let target = target();
    let pool = BufferPool::new(1 << 20);
    let mut random = Prng::new(1);
    for _ in 0..2000 {
        let address = "127.0.0.1:1".parse().unwrap();
        let mut connection = Connection::new(target.clone(), address, address, Nanos::ZERO);
        let mut noise = vec![0; 1 + random.below(500) as usize];
        random.fill(&mut noise);
        noise[0] %= 12;
        let mut requests = Vec::new();
        connection.receive(Nanos::ZERO, &noise, &pool, &mut requests);
        assert!(requests.is_empty());
        assert!(connection.send_buffer().unsent_bytes() <= 152);
        connection.tick(Nanos::from_secs(11));
        assert!(connection.is_closed());
    }
    assert_eq!(target.connection_count(), 0);
}
