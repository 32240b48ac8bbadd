//! The blocks that a cursor has before it comes to them, and its reads of others.
//!
//! ```text
//!   read ahead ──▶ in flight ──▶ held ──the cursor comes to it──▶ its block
//!   in the cache ──────────────▶ held
//! ```
//! All of them are in the cache, too, which may give them up before the cursor comes to them, since gets and other scans need the space. So the cursor holds them itself. What all
//! iterators of a volume hold is within their budget ([`PrefetchBudget`](crate::lsm::prefetch_degree::PrefetchBudget)); without a grant nothing is held, and the cursor takes from
//! the cache what is still there.
//!
//! In: reads, and blocks of the cache. Out: each block once. Invariant: blocks are held in the order of their offsets. Tested below and by the tests of whole tables.

use super::stored_entry::DataBlock;
use crate::lsm::prefetch_degree::PrefetchGrant;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Backward,
}

/// A block with its offset.
#[derive(Clone, Debug)]
pub(super) struct PlacedBlock {
    pub(super) offset: u32,
    pub(super) block: Arc<DataBlock>,
}

/// A block that the cursor holds, with the grant of all blocks that came with it.
struct HeldBlock {
    placed: PlacedBlock,
    _grant: Rc<PrefetchGrant>,
}

/// The read of blocks, also into the cache.
struct BlockRead {
    direction: Direction,
    /// The offset of its first block.
    offset: u32,
    /// For its blocks, in their order.
    grant: Option<Rc<PrefetchGrant>>,
    read: Pin<Box<dyn Future<Output = Vec<PlacedBlock>>>>,
}

impl BlockRead {
    /// Its blocks, if it has ended and they are to be held.
    fn poll(&mut self, context: &mut Context<'_>, held: &mut VecDeque<HeldBlock>) -> Poll<()> {
        let Poll::Ready(blocks) = self.read.as_mut().poll(context) else { return Poll::Pending };
        if let Some(grant) = &self.grant {
            hold(held, blocks, grant);
        }
        Poll::Ready(())
    }
}

/// Blocks ahead of a cursor.
#[derive(Default)]
pub(super) struct BlocksAhead {
    held: VecDeque<HeldBlock>,
    /// In the order of the direction; of one direction.
    reads: VecDeque<BlockRead>,
}

impl BlocksAhead {
    /// The reads in flight.
    pub(super) fn reads(&self) -> usize {
        self.reads.len()
    }

    /// Adds a read, whose first block is at `offset`. It gives blocks in the order of offsets, which are held if there is a grant.
    pub(super) fn add_read(
        &mut self,
        direction: Direction,
        offset: u32,
        grant: Option<Rc<PrefetchGrant>>,
        read: impl Future<Output = Vec<PlacedBlock>> + 'static,
    ) {
        self.reads.push_back(BlockRead { direction, offset, grant, read: Box::pin(read) });
    }

    /// Holds blocks, which are in the order of offsets, while one of them is ahead.
    pub(super) fn hold(&mut self, blocks: Vec<PlacedBlock>, grant: &Rc<PrefetchGrant>) {
        hold(&mut self.held, blocks, grant);
    }

    /// Starts those reads that were not started, and takes the blocks of those that have ended.
    pub(super) async fn poll_reads(&mut self) {
        let BlocksAhead { held, reads } = self;
        poll_fn(|context| {
            reads.retain_mut(|read| read.poll(context, held).is_pending());
            Poll::Ready(())
        })
        .await;
    }

    /// Drops what is of the other direction, and waits for the reads that may have the block at `offset`, to which the cursor moves.
    pub(super) async fn await_block(&mut self, direction: Direction, offset: u32) {
        let BlocksAhead { held, reads } = self;
        reads.retain(|read| read.direction == direction);
        if direction == Direction::Backward {
            held.retain(|held| held.placed.offset <= offset);
        }
        while let Some(read) = reads.front_mut()
            && read.offset <= offset
        {
            poll_fn(|context| read.poll(context, held)).await;
            reads.pop_front();
        }
    }

    /// The block at `offset`, if it is held. Drops those at lower offsets, which a scan forward has passed.
    pub(super) fn take(&mut self, offset: u32) -> Option<Arc<DataBlock>> {
        while let Some(first) = self.held.front()
            && first.placed.offset <= offset
        {
            let HeldBlock { placed, .. } = self.held.pop_front()?;
            if placed.offset == offset {
                return Some(placed.block);
            }
        }
        None
    }

    /// Drops all blocks and reads.
    pub(super) fn clear(&mut self) {
        self.held.clear();
        self.reads.clear();
    }
}

fn hold(held: &mut VecDeque<HeldBlock>, blocks: Vec<PlacedBlock>, grant: &Rc<PrefetchGrant>) {
    for placed in blocks {
        let added = HeldBlock { placed, _grant: Rc::clone(grant) };
        let offset = added.placed.offset;
        match held.back() {
            Some(last) if last.placed.offset >= offset => {
                // Between blocks of the cache, which were there at once.
                let at = held.partition_point(|held| held.placed.offset < offset);
                held.insert(at, added);
            }
            _ => held.push_back(added),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_tables::data_block;
    use super::*;
    use crate::lsm::prefetch_degree::PrefetchBudget;
    use octokv_runtime::block_on;
    use std::future::ready;

    fn placed(offsets: &[u32]) -> Vec<PlacedBlock> {
        let block = |&offset| PlacedBlock { offset, block: data_block(offset as usize, Vec::with_capacity) };
        offsets.iter().map(block).collect()
    }

    fn taken(ahead: &mut BlocksAhead, offsets: &[u32]) -> Vec<u32> {
        let is_right = |block: Arc<DataBlock>, offset| block.bytes().len() > offset as usize;
        let take = |&offset: &u32| {
            ahead.take(offset).filter(|block| is_right(block.clone(), offset)).map(|_| offset)
        };
        offsets.iter().filter_map(take).collect()
    }

    #[test]
    fn blocks_come_in_their_order_whenever_their_reads_end_and_give_their_grants_back() {
        let (budget, mut ahead) = (PrefetchBudget::new(100), BlocksAhead::default());
        let grant = |bytes| budget.take(bytes).map(Rc::new);
        ahead.hold(placed(&[20, 50]), &grant(10).unwrap());
        ahead.add_read(Direction::Forward, 60, grant(40), ready(placed(&[60, 70])));
        ahead.add_read(Direction::Forward, 10, grant(50), ready(placed(&[10, 30, 40])));
        ahead.add_read(Direction::Forward, 80, grant(1), ready(placed(&[80])));
        assert_eq!(ahead.reads(), 3);
        block_on(ahead.poll_reads(), || ());
        assert_eq!((ahead.reads(), budget.taken_bytes()), (0, 100));
        // The one at 80 has no grant.
        assert_eq!(taken(&mut ahead, &[10, 30, 40, 50, 55, 60, 80]), [10, 30, 40, 50, 60]);
        assert_eq!(budget.taken_bytes(), 0, "70 was passed on the way to 80");
    }

    #[test]
    fn what_lies_in_the_other_direction_is_dropped() {
        let (budget, mut ahead) = (PrefetchBudget::new(100), BlocksAhead::default());
        ahead.hold(placed(&[20, 30]), &Rc::new(budget.take(10).unwrap()));
        ahead.add_read(Direction::Forward, 40, None, std::future::pending());
        block_on(ahead.await_block(Direction::Backward, 10), || ());
        assert_eq!((ahead.reads(), budget.taken_bytes()), (0, 0));
        let grant = budget.take(10).map(Rc::new);
        ahead.add_read(Direction::Backward, 0, grant, ready(placed(&[5])));
        block_on(ahead.await_block(Direction::Backward, 5), || ());
        assert_eq!(taken(&mut ahead, &[5]), [5]);
    }
}
