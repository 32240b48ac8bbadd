//! Model checking of the epochs: loom runs every interleaving of readers, writers and the reuse of retired space.
//!
//! Run by `make loom`, with the feature `loom`. Each unit of space is a cell whose accesses loom tracks:
//! a reuse that is concurrent with a read, or not ordered after it, fails. The index is a locked entry, as in a
//! partition of the hash engine.

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;
use octokv_engine::common::allocator::Extent;
use octokv_engine::common::epoch::{EpochReaders, Epochs};
use std::sync::Arc;

/// A unit of the record area. The outer lock makes the cell `Sync`; it is held only to begin an access, so that it
/// orders no accesses in the model.
struct Unit(std::sync::Mutex<UnsafeCell<()>>);

impl Unit {
    fn begin_read(&self) -> loom::cell::ConstPtr<()> {
        self.0.lock().unwrap().get()
    }

    /// Fails if a read or write of the unit is in progress or does not happen before this.
    fn write(&self) {
        drop(self.0.lock().unwrap().get_mut());
    }
}

/// A record area of `UNITS` units, and the index entry of one key, whose record is in unit 0.
struct Volume<const UNITS: usize> {
    epochs: Epochs,
    units: [Unit; UNITS],
    entry: Mutex<Option<usize>>,
}

impl<const UNITS: usize> Volume<UNITS> {
    fn new(cores: usize) -> Arc<Volume<UNITS>> {
        Arc::new(Volume {
            epochs: Epochs::new(cores, UNITS as u64),
            units: std::array::from_fn(|_| Unit(std::sync::Mutex::new(UnsafeCell::new(())))),
            entry: Mutex::new(Some(0)),
        })
    }

    fn lookup(&self) -> Option<&Unit> {
        self.entry.lock().unwrap().map(|unit| &self.units[unit])
    }

    /// Replaces the key's record and retires the space of the previous one.
    fn replace(&self, new: Option<usize>) {
        let old = std::mem::replace(&mut *self.entry.lock().unwrap(), new).expect("the key exists");
        self.epochs.retire(0, &[Extent { location: old as u64, units: 1 }]);
    }

    /// Reuses all space that no reader can use. Gives the number of units.
    fn reuse(&self) -> usize {
        let mut reused = 0;
        self.epochs.reclaim_all(|extent| {
            self.units[extent.location as usize].write();
            reused += 1;
        });
        reused
    }

    /// A core that reads the key's record once.
    fn spawn_reader(volume: &Arc<Volume<UNITS>>, core: usize) -> thread::JoinHandle<()> {
        let volume = Arc::clone(volume);
        thread::spawn(move || {
            let readers = EpochReaders::new(core);
            let _guard = readers.enter(&volume.epochs);
            drop(volume.lookup().map(Unit::begin_read));
        })
    }
}

/// Checks a body of three threads. Bounded to three preemptions, to end within a second (20 s without the bound).
fn three_threads(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(body);
}

#[test]
fn space_is_reused_only_after_its_reader_has_left() {
    loom::model(|| {
        let volume = Volume::<1>::new(1);
        let reader = Volume::spawn_reader(&volume, 0);
        volume.replace(None);
        let before = volume.reuse();
        reader.join().unwrap();
        assert_eq!(before + volume.reuse(), 1, "reusable once, without readers");
    });
}

#[test]
fn space_waits_for_the_readers_of_every_core() {
    three_threads(|| {
        let volume = Volume::<1>::new(2);
        let readers = [0, 1].map(|core| Volume::spawn_reader(&volume, core));
        volume.replace(None);
        let before = volume.reuse();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(before + volume.reuse(), 1, "reusable once, without readers");
    });
}

#[test]
fn space_that_one_core_retires_is_reused_by_another() {
    three_threads(|| {
        let volume = Volume::<1>::new(1);
        let reader = Volume::spawn_reader(&volume, 0);
        let writer_volume = Arc::clone(&volume);
        let writer = thread::spawn(move || writer_volume.replace(None));
        let before = volume.reuse();
        reader.join().unwrap();
        writer.join().unwrap();
        assert_eq!(before + volume.reuse(), 1, "reusable once, without readers");
    });
}

/// A task that waits for space is woken: without that the model ends in a deadlock.
#[test]
fn who_waits_for_readers_to_leave_is_woken() {
    loom::model(|| {
        let volume = Volume::<1>::new(1);
        let reader = Volume::spawn_reader(&volume, 0);
        volume.replace(None);
        // A reader may enter meanwhile with an epoch of before, which it read late.
        while volume.reuse() == 0 {
            loom::future::block_on(volume.epochs.readers_left());
        }
        reader.join().unwrap();
    });
}

/// Two reads of one core whose epochs overlap, while the record moves to another unit and is then deleted.
#[test]
fn a_core_with_overlapping_readers_holds_back_the_space_of_each() {
    loom::model(|| {
        let volume = Volume::<2>::new(1);
        let reader_volume = Arc::clone(&volume);
        let reader = thread::spawn(move || {
            let readers = EpochReaders::new(0);
            let first_guard = readers.enter(&reader_volume.epochs);
            let first_read = reader_volume.lookup().map(Unit::begin_read);
            let second_guard = readers.enter(&reader_volume.epochs);
            let second_read = reader_volume.lookup().map(Unit::begin_read);
            drop(first_read);
            drop(first_guard);
            drop(second_read);
            drop(second_guard);
        });
        volume.units[1].write();
        volume.replace(Some(1));
        let mut reused = volume.reuse();
        volume.replace(None);
        reused += volume.reuse();
        reader.join().unwrap();
        assert_eq!(reused + volume.reuse(), 2, "each reusable once, without readers");
    });
}
