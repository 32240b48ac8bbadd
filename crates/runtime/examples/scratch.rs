#![allow(missing_docs, clippy::all)]
use octokv_base::*;
use octokv_runtime::*;
use octokv_sys::{clock, process, thread};
use std::io::IoSlice;
use std::rc::Rc;
use std::cell::RefCell;
use std::sync::Arc;
struct Echo { w: Vec<(u32, Completed)> }
impl DeviceQueue for Echo {
    fn open(&mut self, _: &Media) -> std::io::Result<FileId> { Ok(FileId(0)) }
    fn submit(&mut self, t: u32, _: FileId, o: Operation) {
        let b = match o { Operation::Write { buffer, .. } => Some(buffer), _ => None };
        self.w.push((t, Completed { buffer: b, result: Ok(()) }));
    }
    fn poll(&mut self, d: &mut Vec<(u32, Completed)>) { d.append(&mut self.w); }
    fn in_flight(&self) -> usize { self.w.len() }
}
fn main() {
    let (tx, rx) = std::sync::mpsc::channel();
    thread::spawn_pinned(0, "srv", move || {
        let bell = Doorbell::new().unwrap();
        let channel = Channel::new(Box::new(Echo { w: vec![] }), 256);
        let mut sockets = RealSockets::new().unwrap();
        let (l, a) = sockets.listen("127.0.0.1:0".parse().unwrap()).unwrap();
        tx.send(a).unwrap();
        let mut idle = Idle::new(Polling::default(), bell.clone(), &mut sockets, None).unwrap();
        let handle = Handle::new(bell.clone(), channel.clone(), Busy::real());
        let mut tasks = Tasks::new(1024, bell.clone());
        let pool = Pool::new(64 << 20);
        let done: Rc<RefCell<Vec<Buffer>>> = Rc::default();
        let mk = |channel: Channel, done: Rc<RefCell<Vec<Buffer>>>, buffer: Buffer| async move {
            let d = channel.submit(FileId(0), Operation::Write { offset: 0, buffer }).await;
            done.borrow_mut().push(d.buffer.unwrap());
        };
        let mut buf = vec![0u8; 1 << 20]; let mut ready = vec![]; let mut open = vec![];
        let mut pend: Vec<Buffer> = vec![]; let mut off = 0usize; let mut part = 0usize;
        loop {
            let mut busy = handle.begin_turn(clock::now()) > 0;
            if let Some((s, _)) = sockets.accept(l) { open.push(s); busy = true; }
            ready.clear(); sockets.ready(&mut ready);
            for &s in &ready {
                if let Received::Bytes(n) = sockets.receive(s, &mut buf) {
                    busy = true;
                    part += n;
                    while part >= 64 { part -= 64; let b = pool.take(4096).unwrap();
                        tasks.spawn(mk(channel.clone(), done.clone(), b)).ok().unwrap(); }
                }
            }
            handle.busy().lap(Stage::Target, busy);
            busy |= channel.poll() > 0;
            handle.busy().lap(Stage::Device, busy);
            busy |= tasks.poll_ready() > 0;
            handle.busy().lap(Stage::Kv, busy);
            pend.append(&mut done.borrow_mut());
            while !pend.is_empty() {
                let sl: Vec<IoSlice> = pend.iter().enumerate().map(|(i, b)| IoSlice::new(&b[if i == 0 { off } else { 0 }..])).collect();
                match sockets.send(open[0], &sl) { Sent::Bytes(mut n) => { n += off; let k = n / 4096; off = n % 4096; pend.drain(..k); } _ => break }
            }
            let (n, d) = (handle.now(), handle.next_deadline());
            idle.rest(busy, n, d, &mut sockets);
        }
    }).unwrap();
    let a = rx.recv().unwrap();
    thread::pin(1).unwrap();
    let mut sockets = RealSockets::new().unwrap();
    let s = sockets.connect(a).unwrap();
    let mut buf = vec![0u8; 1 << 20];
    for depth in [1usize, 8, 32, 128] {
        let t = clock::now(); let mut out = 0usize; let mut got = 0usize; let mut sent = 0usize;
        let total = if depth == 1 { 100_000 } else { 1_000_000 };
        let req = vec![1u8; 64 * depth];
        while got < total * 4096 {
            let k = (depth - out).min(total - sent);
            if k > 0 { if let Sent::Bytes(n) = sockets.send(s, &[IoSlice::new(&req[..k * 64])]) { assert!(n % 64 == 0); out += n / 64; sent += n / 64; } }
            if let Received::Bytes(n) = sockets.receive(s, &mut buf) { let before = got / 4096; got += n; out -= got / 4096 - before; }
        }
        let e = clock::now().since(t);
        println!("depth {depth}: {:.0} K ops/s", total as f64 / e.as_secs_f64() / 1e3);
    }
    // first after idle
    let mut lat = vec![];
    for _ in 0..200 {
        let t = clock::now(); while clock::now().since(t) < Nanos::from_millis(3) {}
        let t = clock::now();
        sockets.send(s, &[IoSlice::new(&[1; 64])]);
        let mut g = 0; while g < 4096 { if let Received::Bytes(n) = sockets.receive(s, &mut buf) { g += n } }
        lat.push(clock::now().since(t).0 / 1000);
    }
    lat.sort(); println!("first after 3 ms idle: p50 {} p99 {} max {} us", lat[100], lat[198], lat[199]);
    let c = process::process_cpu(); let c0 = process::thread_cpu(); let t = clock::now();
    let mut idle_sockets = RealSockets::new().unwrap(); while clock::now().since(t) < Nanos::from_secs(2) { idle_sockets.wait(Nanos::from_secs(2)); }
    println!("idle 2 s: cpu {:?} us (main {:?})", process::process_cpu().since(c).0/1000, process::thread_cpu().since(c0).0/1000);
    let _ = Arc::new(0);
}
