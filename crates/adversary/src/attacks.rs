//! Attacks that go on for as long as they are let: what the measuring program and the soak put beside honest hosts.
//!
//! In: a node, and a [`Baton`] that says when to attack, when to rest, and when it is over. Each attack holds its
//! connections while it attacks and lets all of them go when it rests. What each must be *answered* with is said in
//! the tests of the binary (`crates/octokv/tests/hostile_*.rs`); here only the pressure matters.

use crate::command_builder::{
    abort, event_request, exist, flush, identify, list, log_page, retrieve, store_here, store_there, value,
};
use crate::raw_connection::{Heard, Peer, Victim};
use octokv_base::Random;
use octokv_wire::pdu::{Data, flags};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// One way to attack.
pub struct Attack {
    /// Its name in tables and on the command line.
    pub name: &'static str,
    /// What it does.
    pub what: &'static str,
    run: fn(&Victim, &Baton) -> io::Result<()>,
}

/// Every attack. The first is none: as much load as one thread makes, by the rules.
pub const ATTACKS: &[Attack] = &[
    Attack {
        name: "control",
        what: "no attack: 4 connections, 4 KiB, 16 commands each at a time",
        run: control,
    },
    Attack { name: "connects", what: "64 connections at a time, closed at once", run: connects },
    Attack { name: "handshakes", what: "controllers with a queue, made and left", run: handshakes },
    Attack { name: "half-open", what: "200 silent connections", run: half_open },
    Attack { name: "trickle", what: "32 queues, a command each, byte by byte", run: trickle },
    Attack { name: "garbage", what: "random bytes, before and after ICReq", run: garbage },
    Attack { name: "wrong-pdus", what: "PDUs that may not come, on I/O queues", run: wrong_pdus },
    Attack { name: "small-floods", what: "4 queues full of Exist commands, all the time", run: small_floods },
    Attack { name: "never-read", what: "8 queues of Retrieves whose answers nobody reads", run: never_read },
    Attack { name: "slow-read", what: "8 such queues that read a little now and then", run: slow_read },
    Attack { name: "half-transfers", what: "64 Stores of 1 MiB that stop half-way", run: half_transfers },
    Attack { name: "large-stores", what: "2 queues of Stores of 1 MiB, 4 at a time", run: large_stores },
    Attack { name: "huge-lists", what: "8 Lists of 2 MiB at a time", run: huge_lists },
    Attack { name: "pages", what: "Identify and log pages, 500 at a time", run: pages },
    Attack { name: "events", what: "event requests and aborts, 500 at a time", run: events },
    Attack { name: "bad-digests", what: "Stores of 8 KiB whose data digest is wrong", run: bad_digests },
    Attack { name: "resets", what: "connections reset in the midst of Retrieves", run: resets },
    Attack { name: "flushes", what: "2 queues full of Flush commands", run: flushes },
];

/// The attack of a name.
pub fn by_name(name: &str) -> Option<&'static Attack> {
    ATTACKS.iter().find(|attack| attack.name == name)
}

const REST: u8 = 0;
const GO: u8 = 1;
const OVER: u8 = 2;

/// Says when to attack.
#[derive(Debug, Default)]
pub struct Baton(AtomicU8);

impl Baton {
    /// Whether the attack is on.
    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::Acquire) == GO
    }

    /// Waits until it is on; false when it is over.
    fn wait(&self) -> bool {
        loop {
            match self.0.load(Ordering::Acquire) {
                GO => return true,
                OVER => return false,
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}

/// An attack on a thread of its own, resting at first.
pub struct Attacker {
    baton: Arc<Baton>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Attacker {
    /// Starts one, which gives way to every other thread of the machine where `gives_way`.
    ///
    /// # Errors
    /// When the system makes no thread.
    pub fn start(attack: &'static Attack, victim: &Victim, gives_way: bool) -> io::Result<Attacker> {
        let (baton, rounds) = (Arc::<Baton>::default(), Arc::<AtomicU64>::default());
        let (mine, count, victim) = (Arc::clone(&baton), Arc::clone(&rounds), victim.clone());
        let thread = octokv_sys::thread::spawn(attack.name, move || {
            if gives_way {
                // Where it is refused the attack is only stronger.
                let _ = octokv_sys::thread::give_way();
            }
            while mine.wait() {
                // A node that refuses or ends connections does what it should.
                if (attack.run)(&victim, &mine).is_err() {
                    std::thread::sleep(Duration::from_millis(2));
                }
                count.fetch_add(1, Ordering::Relaxed);
            }
        })?;
        Ok(Attacker { baton, rounds, thread })
    }

    /// Attacks from now on.
    pub fn go(&self) {
        self.baton.0.store(GO, Ordering::Release);
    }

    /// Rests from now on.
    pub fn rest(&self) {
        self.baton.0.store(REST, Ordering::Release);
    }

    /// How often it began anew.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Ends it.
    pub fn end(self) {
        self.baton.0.store(OVER, Ordering::Release);
        let _ = self.thread.join();
    }
}

/// Admin connections and I/O queues of so many controllers with one queue each.
fn pairs(victim: &Victim, count: usize) -> io::Result<(Vec<Peer>, Vec<Peer>)> {
    let pairs: io::Result<Vec<(Peer, Peer)>> = (0..count).map(|_| Peer::pair(victim, 128)).collect();
    Ok(pairs?.into_iter().unzip())
}

/// Keeps `queues` busy with what `make` gives, taking answers as they come.
fn flood(queues: &mut [Peer], baton: &Baton, make: impl Fn(&Peer) -> Vec<u8>) -> io::Result<()> {
    let floods: Vec<Vec<u8>> = queues.iter().map(make).collect();
    let mut sent = vec![0; queues.len()];
    while baton.is_on() {
        let mut moved = false;
        for ((peer, bytes), at) in queues.iter_mut().zip(&floods).zip(&mut sent) {
            let Some(count) = peer.push(&bytes[*at..])? else { return Ok(()) };
            *at = (*at + count) % bytes.len();
            let Some(taken) = peer.drain()? else { return Ok(()) };
            moved |= count + taken > 0;
        }
        if !moved {
            std::thread::yield_now();
        }
    }
    Ok(())
}

fn control(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let (_admins, mut queues) = pairs(victim, 4)?;
    let data = value(1, 4096);
    while baton.is_on() {
        for peer in &mut queues {
            let mut bytes = Vec::new();
            for id in 0..8_u16 {
                bytes.extend(peer.capsule(&store_here(id, &[b'c', id as u8], &data), &data));
                bytes.extend(peer.capsule(&retrieve(100 + id, &[b'c', id as u8], 4096), &[]));
            }
            peer.send(&bytes)?;
        }
        for peer in &mut queues {
            for _ in 0..16 {
                peer.completion()?;
            }
        }
    }
    Ok(())
}

fn connects(victim: &Victim, baton: &Baton) -> io::Result<()> {
    while baton.is_on() {
        let _flood: Vec<_> = (0..64).map(|_| Peer::reach(victim)).collect();
    }
    Ok(())
}

fn handshakes(victim: &Victim, baton: &Baton) -> io::Result<()> {
    while baton.is_on() {
        Peer::pair(victim, 128)?;
    }
    Ok(())
}

fn half_open(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let mut silent: Vec<_> = (0..100).map(|_| Peer::reach(victim)).collect();
    silent.extend((0..100).map(|_| Peer::open(victim, false, false)));
    while baton.is_on() {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn trickle(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let (_admins, mut queues) = pairs(victim, 32)?;
    let bytes = queues[0].capsule(&exist(1, b"trickle"), &[]);
    while baton.is_on() {
        for byte in &bytes {
            for peer in &mut queues {
                peer.send(&[*byte])?;
            }
            std::thread::sleep(Duration::from_millis(1));
            if !baton.is_on() {
                return Ok(());
            }
        }
        for peer in &mut queues {
            peer.completion()?;
        }
    }
    Ok(())
}

fn garbage(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let mut random = Random::new(5);
    while baton.is_on() {
        let opened = random.one_in(2);
        let mut peer = if opened { Peer::open(victim, true, true)? } else { Peer::reach(victim)? };
        let mut bytes = vec![0; 1 + random.below(8192) as usize];
        random.fill(&mut bytes);
        peer.send(&bytes)?;
    }
    Ok(())
}

fn wrong_pdus(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let mut kind = 0_u8;
    while baton.is_on() {
        let (_admin, mut peer) = Peer::pair(victim, 16)?;
        let mut bytes = vec![kind % 12, 0, 24, 0, 24, 0, 0, 0];
        bytes.resize(24, 0xff);
        peer.send(&bytes)?;
        peer.hear()?;
        kind = kind.wrapping_add(1);
    }
    Ok(())
}

fn small_floods(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let (_admins, mut queues) = pairs(victim, 4)?;
    let make = |peer: &Peer| (0..4096).flat_map(|id| peer.capsule(&exist(id, b"flood"), &[])).collect();
    flood(&mut queues, baton, make)
}

fn flushes(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let (_admins, mut queues) = pairs(victim, 2)?;
    flood(&mut queues, baton, |peer| (0..4096).flat_map(|id| peer.capsule(&flush(id), &[])).collect())
}

fn store_unread(peer: &mut Peer) -> io::Result<()> {
    let data = value(2, 12_000);
    peer.ask(&store_here(1, b"unread", &data), &data).map(drop)
}

fn unread(victim: &Victim, baton: &Baton, reads: bool) -> io::Result<()> {
    let (_admins, mut queues) = pairs(victim, 8)?;
    store_unread(&mut queues[0])?;
    let make = |peer: &Peer| -> Vec<u8> {
        (0..8192).flat_map(|id| peer.capsule(&retrieve(id, b"unread", 16 << 10), &[])).collect()
    };
    let bytes = make(&queues[0]);
    let mut sent = vec![0; queues.len()];
    while baton.is_on() {
        for (peer, at) in queues.iter_mut().zip(&mut sent) {
            let Some(count) = peer.push(&bytes[*at..])? else { return Ok(()) };
            *at = (*at + count) % bytes.len();
            if reads && peer.drain()?.is_none() {
                return Ok(());
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn never_read(victim: &Victim, baton: &Baton) -> io::Result<()> {
    unread(victim, baton, false)
}

fn slow_read(victim: &Victim, baton: &Baton) -> io::Result<()> {
    unread(victim, baton, true)
}

fn half_transfers(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let (_admins, mut queues) = pairs(victim, 4)?;
    for peer in &mut queues {
        let commands: Vec<u8> =
            (0..16).flat_map(|id| peer.capsule(&store_there(id, b"half", 1 << 20), &[])).collect();
        peer.send(&commands)?;
        peer.set_patience(Duration::from_millis(20))?;
    }
    while baton.is_on() {
        for peer in &mut queues {
            if let Heard::Ask(range) = peer.hear()? {
                let half = Data { bytes: 64 << 10, ..range };
                let pdu = peer.host_data(half, &value(3, half.bytes as usize), 0);
                peer.send(&pdu)?;
            }
        }
    }
    Ok(())
}

fn large_stores(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let (_admins, mut queues) = pairs(victim, 2)?;
    let data = value(4, 1 << 20);
    while baton.is_on() {
        for peer in &mut queues {
            let stores: Vec<u8> =
                (0..4).flat_map(|id| peer.capsule(&store_there(id, b"large", 1 << 20), &[])).collect();
            peer.send(&stores)?;
        }
        for peer in &mut queues {
            let mut left = 4;
            while left > 0 {
                match peer.hear()? {
                    Heard::Ask(range) => send_all(peer, range, &data)?,
                    Heard::Response(_) => left -= 1,
                    _ => return Ok(()),
                }
            }
        }
    }
    Ok(())
}

/// Everything that an R2T asked for, in pieces that any node takes.
fn send_all(peer: &mut Peer, range: Data, data: &[u8]) -> io::Result<()> {
    const PIECE_BYTES: u32 = 64 << 10;
    let (mut at, end) = (range.offset, range.offset + range.bytes);
    while at < end {
        let bytes = PIECE_BYTES.min(end - at);
        let bits = if at + bytes == end { flags::LAST } else { 0 };
        let piece = Data { offset: at, bytes, ..range };
        let pdu = peer.host_data(piece, &data[at as usize..(at + bytes) as usize], bits);
        peer.send(&pdu)?;
        at += bytes;
    }
    Ok(())
}

fn huge_lists(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let (_admins, mut queues) = pairs(victim, 1)?;
    flood(&mut queues, baton, |peer| {
        (0..8).flat_map(|id| peer.capsule(&list(id, b"", 2 << 20), &[])).collect()
    })
}

fn pages(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let (mut admin, _) = Peer::admin(victim)?;
    while baton.is_on() {
        let ask = |id: u16| if id.is_multiple_of(2) { identify(id, 1) } else { log_page(id, 2, 512) };
        let bytes: Vec<u8> = (0..500).flat_map(|id| admin.capsule(&ask(id), &[])).collect();
        admin.send(&bytes)?;
        for _ in 0..500 {
            admin.completion()?;
        }
    }
    Ok(())
}

fn events(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let (admin, _) = Peer::admin(victim)?;
    let ask = |id: u16| if id.is_multiple_of(2) { event_request(id) } else { abort(id, 0, id - 1) };
    flood(&mut [admin], baton, |peer| (0..500).flat_map(|id| peer.capsule(&ask(id), &[])).collect())
}

fn bad_digests(victim: &Victim, baton: &Baton) -> io::Result<()> {
    let joining = crate::raw_connection::Joining::admin(victim);
    let (_admin, id) = Peer::admin_as(victim, &joining, true, true)?;
    let mut io = Peer::open(victim, true, true)?;
    crate::raw_connection::granted(&io.join(&crate::raw_connection::Joining::io(victim, id, 1, 128))?)?;
    let data = value(6, 8192);
    while baton.is_on() {
        for id in 0..16 {
            let mut bytes = io.capsule(&store_here(id, b"digest", &data), &data);
            *bytes.last_mut().expect("a capsule") ^= 1;
            io.send(&bytes)?;
        }
        for _ in 0..16 {
            io.completion()?;
        }
    }
    Ok(())
}

fn resets(victim: &Victim, baton: &Baton) -> io::Result<()> {
    while baton.is_on() {
        let (_admin, mut io) = Peer::pair(victim, 128)?;
        store_unread(&mut io)?;
        let bytes: Vec<u8> =
            (0..100).flat_map(|id| io.capsule(&retrieve(id, b"unread", 16 << 10), &[])).collect();
        io.send(&bytes)?;
        // Closed with answers unread, which the kernel makes a reset of.
        io.hear()?;
    }
    Ok(())
}
