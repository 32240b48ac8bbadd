//! Continuous attacks, for measuring latency and for the soak test.
//!
//! In: a node, and an [`AttackSwitch`] that starts, pauses and ends the attack. An attack holds its connections while it
//! runs and closes all of them when it pauses. The tests of the binary (`crates/octokv/tests/adversary_*.rs`) specify
//! the *response* to each attack; this file generates only the load.

use crate::command_builder::{
    abort, async_event_request, exist, flush, identify, list, log_page, random_value, retrieve, store_by_r2t,
    store_in_capsule,
};
use crate::raw_connection::{RawConnection, ReceivedPdu, TargetAddr};
use octokv_base::Prng;
use octokv_wire::pdu::{DataHeader, flags};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// An attack.
pub struct Attack {
    /// Its name in tables and on the command line.
    pub name: &'static str,
    /// One line for the table of results.
    pub description: &'static str,
    run: fn(&TargetAddr, &AttackSwitch) -> io::Result<()>,
}

/// Every attack. The first, `control`, is none: the load of one well-behaved thread.
pub const ATTACKS: &[Attack] = &[
    Attack {
        name: "control",
        description: "no attack: 4 connections, 4 KiB, 16 commands each at a time",
        run: control,
    },
    Attack { name: "connects", description: "64 connections at a time, closed at once", run: connects },
    Attack {
        name: "handshakes",
        description: "controllers with a queue, created and dropped",
        run: handshakes,
    },
    Attack { name: "half-open", description: "200 silent connections", run: half_open },
    Attack { name: "trickle", description: "32 queues, a command each, byte by byte", run: trickle },
    Attack { name: "garbage", description: "random bytes, before and after ICReq", run: garbage },
    Attack { name: "wrong-pdus", description: "PDUs not allowed on I/O queues", run: wrong_pdus },
    Attack {
        name: "small-floods",
        description: "4 queues continuously full of Exist commands",
        run: small_floods,
    },
    Attack {
        name: "never-read",
        description: "8 queues of Retrieves, responses never read",
        run: never_read,
    },
    Attack { name: "slow-read", description: "8 queues of Retrieves, responses read slowly", run: slow_read },
    Attack {
        name: "half-transfers",
        description: "64 Stores of 1 MiB that stop half-way",
        run: half_transfers,
    },
    Attack {
        name: "large-stores",
        description: "2 queues of Stores of 1 MiB, 4 at a time",
        run: large_stores,
    },
    Attack { name: "huge-lists", description: "8 Lists of 2 MiB at a time", run: huge_lists },
    Attack { name: "pages", description: "Identify and log pages, 500 at a time", run: pages },
    Attack { name: "events", description: "event requests and aborts, 500 at a time", run: events },
    Attack {
        name: "bad-digests",
        description: "Stores of 8 KiB whose data digest is wrong",
        run: bad_digests,
    },
    Attack { name: "resets", description: "connections reset during Retrieves", run: resets },
    Attack { name: "flushes", description: "2 queues full of Flush commands", run: flushes },
];

/// The attack with this name, or `None`.
pub fn by_name(name: &str) -> Option<&'static Attack> {
    ATTACKS.iter().find(|attack| attack.name == name)
}

const PAUSED: u8 = 0;
const RUNNING: u8 = 1;
const STOPPED: u8 = 2;

/// Starts, pauses and stops an attack; shared with its thread.
#[derive(Debug, Default)]
pub struct AttackSwitch(AtomicU8);

impl AttackSwitch {
    /// Whether the attack runs.
    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::Acquire) == RUNNING
    }

    /// Waits while the attack is paused. Returns false once it is stopped.
    fn wait_until_on(&self) -> bool {
        loop {
            match self.0.load(Ordering::Acquire) {
                RUNNING => return true,
                STOPPED => return false,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

/// An attack on its own thread, initially paused.
pub struct AttackThread {
    switch: Arc<AttackSwitch>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl AttackThread {
    /// Starts the thread, with the lowest scheduling priority if `lowest_priority`.
    ///
    /// # Errors
    /// If the system cannot create a thread.
    pub fn start(
        attack: &'static Attack,
        target: &TargetAddr,
        lowest_priority: bool,
    ) -> io::Result<AttackThread> {
        let (switch, rounds) = (Arc::<AttackSwitch>::default(), Arc::<AtomicU64>::default());
        let (thread_switch, count, target) = (Arc::clone(&switch), Arc::clone(&rounds), target.clone());
        let thread = octokv_sys::thread::spawn(attack.name, move || {
            if lowest_priority {
                // Without permission for it the attack is only stronger.
                let _ = octokv_sys::thread::set_lowest_priority();
            }
            while thread_switch.wait_until_on() {
                // The node may reject or close an attacker's connections.
                if (attack.run)(&target, &thread_switch).is_err() {
                    std::thread::sleep(Duration::from_millis(2));
                }
                count.fetch_add(1, Ordering::Relaxed);
            }
        })?;
        Ok(AttackThread { switch, rounds, thread })
    }

    /// Starts or resumes the attack.
    pub fn resume(&self) {
        self.switch.0.store(RUNNING, Ordering::Release);
    }

    /// Pauses the attack.
    pub fn pause(&self) {
        self.switch.0.store(PAUSED, Ordering::Release);
    }

    /// Number of times that the attack has run to an end.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Stops the attack and joins the thread.
    pub fn stop(self) {
        self.switch.0.store(STOPPED, Ordering::Release);
        let _ = self.thread.join();
    }
}

/// Connects `count` controllers with one I/O queue each; returns admin and I/O connections.
fn connect_pairs(target: &TargetAddr, count: usize) -> io::Result<(Vec<RawConnection>, Vec<RawConnection>)> {
    let pairs: io::Result<Vec<(RawConnection, RawConnection)>> =
        (0..count).map(|_| RawConnection::connect_pair(target, 128)).collect();
    Ok(pairs?.into_iter().unzip())
}

/// Keeps `queues` full of the capsules that `make` returns, discarding responses.
fn flood(
    queues: &mut [RawConnection],
    switch: &AttackSwitch,
    make: impl Fn(&RawConnection) -> Vec<u8>,
) -> io::Result<()> {
    let floods: Vec<Vec<u8>> = queues.iter().map(make).collect();
    let mut sent = vec![0; queues.len()];
    while switch.is_on() {
        let mut moved = false;
        for ((connection, bytes), at) in queues.iter_mut().zip(&floods).zip(&mut sent) {
            let Some(count) = connection.send_nonblocking(&bytes[*at..])? else { return Ok(()) };
            *at = (*at + count) % bytes.len();
            let Some(taken) = connection.receive_nonblocking()? else { return Ok(()) };
            moved |= count + taken > 0;
        }
        if !moved {
            std::thread::yield_now();
        }
    }
    Ok(())
}

fn control(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let (_admins, mut queues) = connect_pairs(target, 4)?;
    let data = random_value(1, 4096);
    while switch.is_on() {
        for connection in &mut queues {
            let mut bytes = Vec::new();
            for id in 0..8_u16 {
                bytes.extend(connection.capsule(&store_in_capsule(id, &[b'c', id as u8], &data), &data));
                bytes.extend(connection.capsule(&retrieve(100 + id, &[b'c', id as u8], 4096), &[]));
            }
            connection.send(&bytes)?;
        }
        for connection in &mut queues {
            for _ in 0..16 {
                connection.receive_completion()?;
            }
        }
    }
    Ok(())
}

fn connects(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    while switch.is_on() {
        let _flood: Vec<_> = (0..64).map(|_| RawConnection::connect_tcp(target)).collect();
    }
    Ok(())
}

fn handshakes(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    while switch.is_on() {
        RawConnection::connect_pair(target, 128)?;
    }
    Ok(())
}

fn half_open(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let mut silent: Vec<_> = (0..100).map(|_| RawConnection::connect_tcp(target)).collect();
    silent.extend((0..100).map(|_| RawConnection::connect_initialised(target, false, false)));
    while switch.is_on() {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn trickle(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let (_admins, mut queues) = connect_pairs(target, 32)?;
    let bytes = queues[0].capsule(&exist(1, b"trickle"), &[]);
    while switch.is_on() {
        for byte in &bytes {
            for connection in &mut queues {
                connection.send(&[*byte])?;
            }
            std::thread::sleep(Duration::from_millis(1));
            if !switch.is_on() {
                return Ok(());
            }
        }
        for connection in &mut queues {
            connection.receive_completion()?;
        }
    }
    Ok(())
}

fn garbage(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let mut random = Prng::new(5);
    while switch.is_on() {
        let is_initialised = random.one_in(2);
        let mut connection = if is_initialised {
            RawConnection::connect_initialised(target, true, true)?
        } else {
            RawConnection::connect_tcp(target)?
        };
        let mut bytes = vec![0; 1 + random.below(8192) as usize];
        random.fill(&mut bytes);
        connection.send(&bytes)?;
    }
    Ok(())
}

fn wrong_pdus(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let mut kind = 0_u8;
    while switch.is_on() {
        let (_admin, mut connection) = RawConnection::connect_pair(target, 16)?;
        let mut bytes = vec![kind % 12, 0, 24, 0, 24, 0, 0, 0];
        bytes.resize(24, 0xff);
        connection.send(&bytes)?;
        connection.receive_pdu()?;
        kind = kind.wrapping_add(1);
    }
    Ok(())
}

fn small_floods(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let (_admins, mut queues) = connect_pairs(target, 4)?;
    let make = |connection: &RawConnection| {
        (0..4096).flat_map(|id| connection.capsule(&exist(id, b"flood"), &[])).collect()
    };
    flood(&mut queues, switch, make)
}

fn flushes(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let (_admins, mut queues) = connect_pairs(target, 2)?;
    flood(&mut queues, switch, |connection| {
        (0..4096).flat_map(|id| connection.capsule(&flush(id), &[])).collect()
    })
}

fn store_unread(connection: &mut RawConnection) -> io::Result<()> {
    let data = random_value(2, 12_000);
    connection.execute(&store_in_capsule(1, b"unread", &data), &data).map(drop)
}

fn unread(target: &TargetAddr, switch: &AttackSwitch, reads: bool) -> io::Result<()> {
    let (_admins, mut queues) = connect_pairs(target, 8)?;
    store_unread(&mut queues[0])?;
    let make = |connection: &RawConnection| -> Vec<u8> {
        (0..8192).flat_map(|id| connection.capsule(&retrieve(id, b"unread", 16 << 10), &[])).collect()
    };
    let bytes = make(&queues[0]);
    let mut sent = vec![0; queues.len()];
    while switch.is_on() {
        for (connection, at) in queues.iter_mut().zip(&mut sent) {
            let Some(count) = connection.send_nonblocking(&bytes[*at..])? else { return Ok(()) };
            *at = (*at + count) % bytes.len();
            if reads && connection.receive_nonblocking()?.is_none() {
                return Ok(());
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn never_read(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    unread(target, switch, false)
}

fn slow_read(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    unread(target, switch, true)
}

fn half_transfers(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let (_admins, mut queues) = connect_pairs(target, 4)?;
    for connection in &mut queues {
        let commands: Vec<u8> =
            (0..16).flat_map(|id| connection.capsule(&store_by_r2t(id, b"half", 1 << 20), &[])).collect();
        connection.send(&commands)?;
        connection.set_receive_timeout(Duration::from_millis(20))?;
    }
    while switch.is_on() {
        for connection in &mut queues {
            if let ReceivedPdu::R2t(range) = connection.receive_pdu()? {
                let half = DataHeader { bytes: 64 << 10, ..range };
                let pdu = connection.h2c_data(half, &random_value(3, half.bytes as usize), 0);
                connection.send(&pdu)?;
            }
        }
    }
    Ok(())
}

fn large_stores(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let (_admins, mut queues) = connect_pairs(target, 2)?;
    let data = random_value(4, 1 << 20);
    while switch.is_on() {
        for connection in &mut queues {
            let stores: Vec<u8> =
                (0..4).flat_map(|id| connection.capsule(&store_by_r2t(id, b"large", 1 << 20), &[])).collect();
            connection.send(&stores)?;
        }
        for connection in &mut queues {
            let mut left = 4;
            while left > 0 {
                match connection.receive_pdu()? {
                    ReceivedPdu::R2t(range) => send_all(connection, range, &data)?,
                    ReceivedPdu::Response(_) => left -= 1,
                    _ => return Ok(()),
                }
            }
        }
    }
    Ok(())
}

/// Sends all data of an R2T in PDUs within any node's MAXH2CDATA.
fn send_all(connection: &mut RawConnection, range: DataHeader, data: &[u8]) -> io::Result<()> {
    const PIECE_BYTES: u32 = 64 << 10;
    let (mut at, end) = (range.offset, range.offset + range.bytes);
    while at < end {
        let bytes = PIECE_BYTES.min(end - at);
        let bits = if at + bytes == end { flags::LAST } else { 0 };
        let piece = DataHeader { offset: at, bytes, ..range };
        let pdu = connection.h2c_data(piece, &data[at as usize..(at + bytes) as usize], bits);
        connection.send(&pdu)?;
        at += bytes;
    }
    Ok(())
}

fn huge_lists(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let (_admins, mut queues) = connect_pairs(target, 1)?;
    flood(&mut queues, switch, |connection| {
        (0..8).flat_map(|id| connection.capsule(&list(id, b"", 2 << 20), &[])).collect()
    })
}

fn pages(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let (mut admin, _) = RawConnection::connect_admin(target)?;
    while switch.is_on() {
        let command = |id: u16| if id.is_multiple_of(2) { identify(id, 1) } else { log_page(id, 2, 512) };
        let bytes: Vec<u8> = (0..500).flat_map(|id| admin.capsule(&command(id), &[])).collect();
        admin.send(&bytes)?;
        for _ in 0..500 {
            admin.receive_completion()?;
        }
    }
    Ok(())
}

fn events(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let (admin, _) = RawConnection::connect_admin(target)?;
    let command = |id: u16| if id.is_multiple_of(2) { async_event_request(id) } else { abort(id, 0, id - 1) };
    flood(&mut [admin], switch, |connection| {
        (0..500).flat_map(|id| connection.capsule(&command(id), &[])).collect()
    })
}

fn bad_digests(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    let params = crate::raw_connection::ConnectParams::admin(target);
    let (_admin, id) = RawConnection::connect_admin_as(target, &params, true, true)?;
    let mut io = RawConnection::connect_initialised(target, true, true)?;
    crate::raw_connection::expect_success(
        &io.fabrics_connect(&crate::raw_connection::ConnectParams::io(target, id, 1, 128))?,
    )?;
    let data = random_value(6, 8192);
    while switch.is_on() {
        for id in 0..16 {
            let mut bytes = io.capsule(&store_in_capsule(id, b"digest", &data), &data);
            *bytes.last_mut().expect("a capsule") ^= 1;
            io.send(&bytes)?;
        }
        for _ in 0..16 {
            io.receive_completion()?;
        }
    }
    Ok(())
}

fn resets(target: &TargetAddr, switch: &AttackSwitch) -> io::Result<()> {
    while switch.is_on() {
        let (_admin, mut io) = RawConnection::connect_pair(target, 128)?;
        store_unread(&mut io)?;
        let bytes: Vec<u8> =
            (0..100).flat_map(|id| io.capsule(&retrieve(id, b"unread", 16 << 10), &[])).collect();
        io.send(&bytes)?;
        // Closing with unread responses makes the kernel send a reset.
        io.receive_pdu()?;
    }
    Ok(())
}
