//! Model checking of the wake-ups: loom runs every interleaving, and every value that a relaxed load may return.
//!
//! Run by `make loom`, with the feature `loom`. A lost wake-up leaves the core asleep forever,
//! which loom reports as a deadlock. loom weakens sequentially consistent accesses to acquire and release and
//! models fences exactly: it may report a false failure, but misses none.

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use octokv_runtime::{CoreWaker, TaskSlab};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};

/// Checks a body of three threads. Bounded to two preemptions, to end within seconds: a lost wake-up needs no more
/// (a missing fence in `CoreWaker::notify` or `begin_iteration` is found).
fn three_threads(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(body);
}

/// One pass of a reactor's loop that found nothing to do: sleeps, unless the core was notified.
fn sleep_if_idle(core_waker: &CoreWaker) {
    if core_waker.try_sleep() {
        core_waker.event().expect("this core blocks").wait();
        core_waker.on_wake();
    }
}

/// A thread that publishes by `flag` and notifies the core.
fn publish(flag: &Arc<AtomicBool>, core_waker: &Arc<CoreWaker>) -> thread::JoinHandle<()> {
    let (flag, core_waker) = (Arc::clone(flag), Arc::clone(core_waker));
    thread::spawn(move || {
        flag.store(true, Ordering::Relaxed);
        core_waker.notify();
    })
}

#[test]
fn a_core_sees_the_flags_of_two_threads_without_a_lost_wake_up() {
    three_threads(|| {
        let core_waker = CoreWaker::new().unwrap();
        let flags: [Arc<AtomicBool>; 2] = std::array::from_fn(|_| Arc::new(AtomicBool::new(false)));
        let senders = flags.each_ref().map(|flag| publish(flag, &core_waker));
        loop {
            core_waker.begin_iteration();
            if flags.iter().all(|flag| flag.load(Ordering::Relaxed)) {
                break;
            }
            sleep_if_idle(&core_waker);
        }
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}

#[test]
fn a_thread_that_publishes_twice_wakes_the_core_for_the_second_time_too() {
    loom::model(|| {
        let core_waker = CoreWaker::new().unwrap();
        let flags: [Arc<AtomicBool>; 2] = std::array::from_fn(|_| Arc::new(AtomicBool::new(false)));
        let (sender_flags, sender_waker) = (flags.clone(), Arc::clone(&core_waker));
        let sender = thread::spawn(move || {
            for flag in sender_flags {
                flag.store(true, Ordering::Relaxed);
                sender_waker.notify();
            }
        });
        for flag in &flags {
            loop {
                core_waker.begin_iteration();
                if flag.load(Ordering::Relaxed) {
                    break;
                }
                sleep_if_idle(&core_waker);
            }
        }
        sender.join().unwrap();
    });
}

/// A reactor with `tasks`, each of which ends once its flag is set; one thread per task sets it and wakes the task.
fn run_tasks(task_count: usize) {
    let core_waker = CoreWaker::new().unwrap();
    let mut tasks = TaskSlab::new(task_count, Arc::clone(&core_waker));
    let mut wakers = Vec::new();
    for _ in 0..task_count {
        let flag = Arc::new(AtomicBool::new(false));
        let (seen, registered) = (Arc::clone(&flag), Arc::new(std::sync::Mutex::new(None::<Waker>)));
        let register = Arc::clone(&registered);
        let task = poll_fn(move |context| {
            register.lock().unwrap().get_or_insert_with(|| context.waker().clone());
            if seen.load(Ordering::Relaxed) { Poll::Ready(()) } else { Poll::Pending }
        });
        assert!(tasks.spawn(task).is_ok());
        let waker = registered.lock().unwrap().take().expect("the task was polled");
        wakers.push(thread::spawn(move || {
            flag.store(true, Ordering::Relaxed);
            waker.wake();
        }));
    }
    while tasks.running() > 0 {
        core_waker.begin_iteration();
        if tasks.poll_ready() == 0 {
            sleep_if_idle(&core_waker);
        }
    }
    wakers.into_iter().for_each(|waker| waker.join().unwrap());
}

#[test]
fn a_task_is_woken_by_another_thread() {
    loom::model(|| run_tasks(1));
}

#[test]
fn two_tasks_of_one_word_are_woken_by_two_threads() {
    three_threads(|| run_tasks(2));
}
