//! The papers' drive as the cores of a node see it: contents, and the model of `octokv_device::nand` for the time.
//!
//! ```text
//!   a core asks ──the work before is done──▶ model: until when? ──then──▶ answered, the core has a turn
//! ```
//! In: operations of any core. Out: their completion. Holds: the model, and of each page what is before its last byte that
//! is not zero: values of zeros take no memory. `NandDevice` plays the same model; here an operation comes to
//! the drive when its core has done the work that led to it, and not at the begin of the turn.

use octokv_base::map::Map;
use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::ssd_model::Model;
use octokv_device::{Device, Done, Geometry, Pending};
use octokv_runtime::simulated::VirtualWorld;
use octokv_runtime::{Handle, Underway};
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

const PAGE: usize = 4096;

/// What all cores share of a drive.
pub struct Flash {
    model: Model,
    pages: Map<u64, Box<[u8]>>,
}

impl Flash {
    /// An empty drive.
    pub fn new(model: Model) -> Rc<RefCell<Flash>> {
        Rc::new(RefCell::new(Flash { model, pages: Map::default() }))
    }

    fn write(&mut self, at: Lba, bytes: &[u8]) {
        for (page, bytes) in (at.0..).zip(bytes.chunks(PAGE)) {
            match bytes.iter().rposition(|&byte| byte != 0) {
                Some(last) => self.pages.insert(page, bytes[..=last].into()),
                None => self.pages.remove(&page),
            };
        }
    }

    fn read(&self, at: Lba, into: &mut [u8]) {
        for (page, into) in (at.0..).zip(into.chunks_mut(PAGE)) {
            let kept = self.pages.get(&page).map_or(&[][..], |kept| kept);
            into[..kept.len()].copy_from_slice(kept);
            into[kept.len()..].fill(0);
        }
    }
}

/// One core's view of it.
pub struct FlashDevice {
    flash: Rc<RefCell<Flash>>,
    geometry: Geometry,
    handle: Handle,
    world: VirtualWorld,
}

#[derive(Default)]
struct Answer {
    done: Option<Done>,
    waker: Option<Waker>,
}

struct Waits {
    answer: Rc<RefCell<Answer>>,
    _underway: Underway,
}

impl Future for Waits {
    type Output = Done;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Done> {
        let mut answer = self.answer.borrow_mut();
        match answer.done.take() {
            Some(done) => Poll::Ready(done),
            None => {
                answer.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl FlashDevice {
    /// The view of the core of `handle`. On a drive that says it is volatile an engine keeps no journal.
    pub fn new(
        flash: &Rc<RefCell<Flash>>,
        (pages, volatile): (u64, bool),
        handle: &Handle,
        world: &VirtualWorld,
    ) -> FlashDevice {
        let geometry = Geometry { block_bytes: PAGE as u32, blocks: pages, volatile };
        FlashDevice { flash: Rc::clone(flash), geometry, handle: handle.clone(), world: world.clone() }
    }

    /// Has `act` tell, when the operation comes to the drive, until when it takes, and what is answered then.
    fn operate(&self, act: impl FnOnce(&mut Flash, Nanos) -> (Nanos, Option<Buffer>) + 'static) -> Pending {
        let answer: Rc<RefCell<Answer>> = Rc::default();
        let (flash, world, later) = (Rc::clone(&self.flash), self.world.clone(), Rc::clone(&answer));
        let comes = self.handle.now() + self.handle.busy().within_turn();
        self.world.at(comes, move || {
            let (until, buffer) = act(&mut flash.borrow_mut(), comes);
            world.at(until, move || {
                let mut answer = later.borrow_mut();
                answer.done = Some(Done { buffer, result: Ok(()) });
                if let Some(waker) = answer.waker.take() {
                    waker.wake();
                }
            });
        });
        Pending::later(Waits { answer, _underway: self.handle.underway() })
    }
}

impl Device for FlashDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn name(&self) -> &str {
        "modelled drive"
    }
    fn read(&self, at: Lba, mut buffer: Buffer) -> Pending {
        if !self.geometry.holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        self.operate(move |flash, now| {
            flash.read(at, &mut buffer);
            (flash.model.read(now, at, (buffer.len() / PAGE) as u64), Some(buffer))
        })
    }
    fn write(&self, at: Lba, buffer: Buffer) -> Pending {
        if !self.geometry.holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        self.operate(move |flash, now| {
            flash.write(at, &buffer);
            (flash.model.write(now, at, (buffer.len() / PAGE) as u64), Some(buffer))
        })
    }
    fn flush(&self) -> Pending {
        self.operate(|flash, now| (flash.model.flush(now), None))
    }
    fn trim(&self, at: Lba, blocks: u64) -> Pending {
        let end = at.0.saturating_add(blocks).min(self.geometry.blocks);
        self.operate(move |flash, now| (flash.model.trim(now, at, end.saturating_sub(at.0)), None))
    }
}
