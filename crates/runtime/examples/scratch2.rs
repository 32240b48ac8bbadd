#![allow(missing_docs, clippy::all)]
use octokv_base::*;
use octokv_runtime::*;
use octokv_sys::file::open_device;
fn main() {
    let p = std::env::args().nth(1).unwrap();
    let f = open_device(p.as_ref(), None, true);
    if let Err(e) = &f { println!("refused: {e:?}"); return; }
    let f = f.unwrap();
    println!("{:?}", f);
    println!("second: {:?}", open_device(p.as_ref(), None, true).err());
    let m = Media::file(f);
    let bell = Doorbell::new().unwrap();
    for d in [DeviceDriver::Uring, DeviceDriver::Threads] {
        let (q, d) = device_queue(d, 8, &bell).unwrap();
        let c = Channel::new(q, 8);
        let id = c.open(&m).unwrap();
        let w = |t: Ticket| block_on(t, || { c.poll(); });
        let mut b = Buffer::zeroed(65536); b.fill(7);
        println!("{d:?} write {:?}", w(c.submit(id, Operation::Write { offset: 0, buffer: b })).result);
        println!("trim {:?}", w(c.submit(id, Operation::Trim { offset: 4096, bytes: 8192 })).result);
        println!("flush {:?}", w(c.submit(id, Operation::Flush)).result);
        let r = w(c.submit(id, Operation::Read { offset: 0, buffer: Buffer::zeroed(65536) })).buffer.unwrap();
        println!("{} {} {}", r[0], r[4096], r[20000]);
    }
}
