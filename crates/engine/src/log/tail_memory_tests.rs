//! Memory of the buffer pool that a value tail holds after failures; the histories of `value_tail_tests` hold it, too.

use super::value_tail::TailTurn;
use super::value_tail_tests::{ERROR, TestTail, layout};
use std::task::Poll;

#[test]
fn what_is_left_of_records_whose_writers_failed_is_no_memory_of_the_pool() {
    let mut test = TestTail::new(layout(512, 128, 3), true);
    test.put(60_000).unwrap();
    let (_, failed) = test.append(10).unwrap();
    let Poll::Ready(TailTurn::Lead(writes)) = test.poll(&failed) else { panic!("it leads") };
    // It begins in the unit of the write in flight, and goes on in the next chunk.
    let (_, shares) = test.append(20_000).unwrap();
    drop(writes);
    test.tail.finished(Err(ERROR)).wake();
    assert!(matches!(test.poll(&failed), Poll::Ready(TailTurn::Failed(ERROR))));
    assert!(matches!(test.poll(&shares), Poll::Ready(TailTurn::Failed(ERROR))));
    assert_eq!(test.buffers.in_use_bytes(), 0);
    // A dropped writer leaves nothing either, and what is left is written with the next record.
    let (_, dropped) = test.append(2_000).unwrap();
    test.tail.forget(dropped).wake();
    assert_eq!(test.buffers.in_use_bytes(), 0);
    test.put(100).unwrap();
    assert_eq!(test.buffers.in_use_bytes(), 0);
    test.check();
}
