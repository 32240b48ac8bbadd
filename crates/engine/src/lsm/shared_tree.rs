//! Persistent ordered trees: an edit gives a new tree that shares with the old one what it did not change.
//!
//! ```text
//!   tree ─▶ inner: (child, its first item, its number of items, their summary) × 2–8 ─▶ … ─▶ leaf: items × 8–32
//! ```
//! A B+ tree of reference-counted nodes of exact size. Items are references; their keys are looked up in what they refer to. An edit of c items
//! that lie together copies their leaves and the path to these: O(c + log n) in time and memory.
//!
//! The crate `imbl` has such a set (`OrdSet`). It is not used: its inner nodes keep items that are no longer in the set, so a table's space would not be freed. Of
//! 65,000 items, removed one by one in random order, up to 1,719 removed ones were still referred to (version 7.0.2). It has no summaries either. It takes
//! 25.0 B for each reference to an item, and 1.75 KB for a version that replaces 11 neighbours; this tree takes
//! 11.5 B and, in two levels with all that a version has, 3.6 KB (`examples/version_memory.rs`).
//!
//! Invariants: keys ascend strictly; all leaves have one depth; nodes other than the root have at least a quarter of the most that they hold; first items, numbers
//! and summaries are exact. Tested below against a `BTreeMap`.

use smallvec::SmallVec;
use std::borrow::Borrow;
use std::ops::Range;
use std::sync::Arc;

/// The most items of a leaf.
pub const LEAF_ITEMS_MAX: usize = 32;
/// The most children of an inner node.
pub const INNER_CHILDREN_MAX: usize = 8;
/// A node other than the root has at least this part of the most.
const FILL_DIVISOR: usize = 4;

/// A sum over the items of a subtree.
pub trait TreeSummary: Copy + Default {
    /// Adds another. Associative; the default is neutral.
    fn add(&mut self, other: &Self);
}

/// What a tree orders.
pub trait TreeItem {
    /// Its key.
    type Key: Ord + ?Sized;
    /// What inner nodes know of the items below.
    type Summary: TreeSummary;

    /// The key. The same for the life of the item.
    fn key(&self) -> &Self::Key;
    /// The summary of this item alone. The same for the life of the item.
    fn summary(&self) -> Self::Summary;
}

/// One change of an edit.
#[derive(Debug)]
pub enum TreeChange<T: TreeItem, K> {
    /// The item comes, in place of one with the same key.
    Put(Arc<T>),
    /// The item with this key goes, if there is one.
    Remove(K),
}

impl<T: TreeItem, K: Borrow<T::Key>> TreeChange<T, K> {
    fn key(&self) -> &T::Key {
        match self {
            TreeChange::Put(item) => item.key(),
            TreeChange::Remove(key) => key.borrow(),
        }
    }
}

enum SharedNode<T: TreeItem> {
    Leaf(Arc<[Arc<T>]>),
    Inner(Arc<[SharedChild<T>]>),
}

struct SharedChild<T: TreeItem> {
    node: SharedNode<T>,
    first: Arc<T>,
    items: u32,
    summary: T::Summary,
}

// Derived ones would ask for `T: Clone`.
impl<T: TreeItem> Clone for SharedNode<T> {
    fn clone(&self) -> SharedNode<T> {
        match self {
            SharedNode::Leaf(items) => SharedNode::Leaf(items.clone()),
            SharedNode::Inner(children) => SharedNode::Inner(children.clone()),
        }
    }
}

impl<T: TreeItem> Clone for SharedChild<T> {
    fn clone(&self) -> SharedChild<T> {
        let SharedChild { node, first, items, summary } = self;
        SharedChild { node: node.clone(), first: first.clone(), items: *items, summary: *summary }
    }
}

impl<T: TreeItem> SharedChild<T> {
    fn leaf(items: &[Arc<T>]) -> SharedChild<T> {
        let mut summary = T::Summary::default();
        items.iter().for_each(|item| summary.add(&item.summary()));
        SharedChild {
            first: items[0].clone(),
            items: items.len() as u32,
            summary,
            node: SharedNode::Leaf(items.into()),
        }
    }

    fn inner(children: &[SharedChild<T>]) -> SharedChild<T> {
        let mut summary = T::Summary::default();
        children.iter().for_each(|child| summary.add(&child.summary));
        SharedChild {
            first: children[0].first.clone(),
            items: children.iter().map(|child| child.items).sum(),
            summary,
            node: SharedNode::Inner(children.into()),
        }
    }

    fn is_small(&self) -> bool {
        match &self.node {
            SharedNode::Leaf(items) => items.len() < LEAF_ITEMS_MAX / FILL_DIVISOR,
            SharedNode::Inner(children) => children.len() < INNER_CHILDREN_MAX / FILL_DIVISOR,
        }
    }

    /// The nodes that this one becomes by an edit, all of its height; the last may be small if it is alone.
    fn edited<K: Borrow<T::Key>>(&self, changes: &[TreeChange<T, K>]) -> Vec<SharedChild<T>> {
        match &self.node {
            SharedNode::Leaf(items) => pack(&merged(items, changes), LEAF_ITEMS_MAX, SharedChild::leaf),
            SharedNode::Inner(children) => {
                let mut edited = Vec::with_capacity(children.len() + 1);
                let mut rest = changes;
                for (index, child) in children.iter().enumerate() {
                    let count = match children.get(index + 1) {
                        Some(next) => rest.partition_point(|change| change.key() < next.first.key()),
                        None => rest.len(),
                    };
                    let (part, behind) = rest.split_at(count);
                    rest = behind;
                    if part.is_empty() {
                        edited.push(child.clone());
                    } else {
                        edited.extend(child.edited(part));
                    }
                }
                pack(&join_small(edited), INNER_CHILDREN_MAX, SharedChild::inner)
            }
        }
    }

    /// The nodes that this one and the next one of its height become if one of them is small.
    fn joined(&self, next: &SharedChild<T>) -> Vec<SharedChild<T>> {
        match (&self.node, &next.node) {
            (SharedNode::Leaf(before), SharedNode::Leaf(after)) => {
                pack(&[&before[..], after].concat(), LEAF_ITEMS_MAX, SharedChild::leaf)
            }
            (SharedNode::Inner(before), SharedNode::Inner(after)) => {
                let children = join_small([&before[..], after].concat());
                pack(&children, INNER_CHILDREN_MAX, SharedChild::inner)
            }
            _ => unreachable!("all leaves have one depth"),
        }
    }
}

/// The items of a leaf after an edit.
fn merged<T: TreeItem, K: Borrow<T::Key>>(items: &[Arc<T>], changes: &[TreeChange<T, K>]) -> Vec<Arc<T>> {
    let mut merged = Vec::with_capacity(items.len() + changes.len());
    let mut rest = items;
    for change in changes {
        let (before, behind) = rest.split_at(rest.partition_point(|item| item.key() < change.key()));
        merged.extend_from_slice(before);
        let is_replaced = behind.first().is_some_and(|item| item.key() == change.key());
        rest = &behind[usize::from(is_replaced)..];
        if let TreeChange::Put(item) = change {
            merged.push(item.clone());
        }
    }
    merged.extend_from_slice(rest);
    merged
}

/// As few nodes as hold all of `parts`, filled evenly: if they are several, each is at least half full.
fn pack<P, T: TreeItem>(
    parts: &[P],
    most: usize,
    make: impl Fn(&[P]) -> SharedChild<T>,
) -> Vec<SharedChild<T>> {
    let count = parts.len().div_ceil(most);
    (0..count)
        .map(|index| make(&parts[parts.len() * index / count..parts.len() * (index + 1) / count]))
        .collect()
}

/// Joins small nodes with a neighbour, until none is small, or one is alone.
fn join_small<T: TreeItem>(nodes: Vec<SharedChild<T>>) -> Vec<SharedChild<T>> {
    let mut joined: Vec<SharedChild<T>> = Vec::with_capacity(nodes.len());
    for node in nodes {
        joined.push(node);
        while let [.., before, last] = &joined[..]
            && (before.is_small() || last.is_small())
        {
            let nodes = before.joined(last);
            joined.truncate(joined.len() - 2);
            joined.extend(nodes);
        }
    }
    joined
}

/// A persistent ordered tree. A clone shares everything.
pub struct SharedTree<T: TreeItem> {
    root: Option<SharedChild<T>>,
}

impl<T: TreeItem> Clone for SharedTree<T> {
    fn clone(&self) -> SharedTree<T> {
        SharedTree { root: self.root.clone() }
    }
}

impl<T: TreeItem> Default for SharedTree<T> {
    fn default() -> SharedTree<T> {
        SharedTree { root: None }
    }
}

impl<T: TreeItem> SharedTree<T> {
    /// The tree of these items. REQUIRES: their keys ascend strictly.
    pub fn from_sorted(items: &[Arc<T>]) -> SharedTree<T> {
        debug_assert!(items.is_sorted_by(|before, after| before.key() < after.key()));
        SharedTree::grown(pack(items, LEAF_ITEMS_MAX, SharedChild::leaf))
    }

    /// The tree whose nodes of one height these are.
    fn grown(mut nodes: Vec<SharedChild<T>>) -> SharedTree<T> {
        while nodes.len() > 1 {
            nodes = pack(&nodes, INNER_CHILDREN_MAX, SharedChild::inner);
        }
        let mut root = nodes.pop();
        while let Some(SharedChild { node: SharedNode::Inner(children), .. }) = &root
            && let [child] = &children[..]
        {
            root = Some(child.clone());
        }
        SharedTree { root }
    }

    /// This tree after changes. REQUIRES: the keys of the changes ascend strictly.
    pub fn edited<K: Borrow<T::Key>>(&self, changes: &[TreeChange<T, K>]) -> SharedTree<T> {
        assert!(changes.is_sorted_by(|before, after| before.key() < after.key()), "changes are in order");
        match &self.root {
            _ if changes.is_empty() => self.clone(),
            Some(root) => SharedTree::grown(root.edited(changes)),
            None => SharedTree::from_sorted(&merged(&[], changes)),
        }
    }

    /// The number of items.
    pub fn len(&self) -> usize {
        self.root.as_ref().map_or(0, |root| root.items as usize)
    }

    /// Whether there is no item.
    pub fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// The summary of all items.
    pub fn summary(&self) -> T::Summary {
        self.root.as_ref().map_or_else(T::Summary::default, |root| root.summary)
    }

    /// The number of items whose key is below `key`, or is `key` if `or_equal`.
    pub fn rank(&self, key: &T::Key, or_equal: bool) -> usize {
        let is_before = |item: &T| if or_equal { item.key() <= key } else { item.key() < key };
        let mut rank = 0;
        let mut at = self.root.as_ref();
        while let Some(SharedChild { node, .. }) = at {
            match node {
                SharedNode::Leaf(items) => {
                    rank += items.partition_point(|item| is_before(item));
                    break;
                }
                SharedNode::Inner(children) => {
                    let count = children.partition_point(|child| is_before(&child.first));
                    let index = count.saturating_sub(1);
                    rank += children[..index].iter().map(|child| child.items as usize).sum::<usize>();
                    at = Some(&children[index]);
                }
            }
        }
        rank
    }

    /// The item of a rank, from 0.
    pub fn nth(&self, rank: usize) -> Option<&Arc<T>> {
        let (items, index) = self.leaf_of(rank)?;
        Some(&items[index])
    }

    /// The item of a key.
    pub fn get(&self, key: &T::Key) -> Option<&Arc<T>> {
        self.nth(self.rank(key, false)).filter(|item| item.key() == key)
    }

    /// The last item whose key is `key` or below.
    pub fn floor(&self, key: &T::Key) -> Option<&Arc<T>> {
        self.nth(self.rank(key, true).checked_sub(1)?)
    }

    /// The leaf with the item of a rank, and where in it that item is.
    fn leaf_of(&self, rank: usize) -> Option<(&[Arc<T>], usize)> {
        let mut rest = rank;
        let mut at = self.root.as_ref().filter(|root| rank < root.items as usize)?;
        loop {
            match &at.node {
                SharedNode::Leaf(items) => return Some((items, rest)),
                SharedNode::Inner(children) => {
                    at = children.iter().find(|child| match rest.checked_sub(child.items as usize) {
                        None => true,
                        Some(behind) => {
                            rest = behind;
                            false
                        }
                    })?;
                }
            }
        }
    }

    /// The items of these ranks, as far as they exist, from either end.
    pub fn range(&self, ranks: Range<usize>) -> TreeRange<'_, T> {
        let end = ranks.end.min(self.len());
        TreeRange { tree: self, ranks: ranks.start.min(end)..end, front: &[], back: &[] }
    }

    /// All items.
    pub fn iter(&self) -> TreeRange<'_, T> {
        self.range(0..usize::MAX)
    }

    /// The first item of at least this rank whose summary is wanted, with its rank. REQUIRES: if an item's summary is wanted, so is every sum in
    /// which it is.
    pub fn find_from(
        &self,
        rank: usize,
        is_wanted: impl Fn(&T::Summary) -> bool,
    ) -> Option<(usize, &Arc<T>)> {
        let mut stack: SmallVec<[(usize, &SharedChild<T>); 64]> = SmallVec::new();
        stack.extend(self.root.as_ref().map(|root| (0, root)));
        while let Some((start, at)) = stack.pop() {
            if start + at.items as usize <= rank || !is_wanted(&at.summary) {
                continue;
            }
            match &at.node {
                SharedNode::Leaf(items) => {
                    let from = rank.saturating_sub(start);
                    let found = items[from..].iter().position(|item| is_wanted(&item.summary()));
                    if let Some(index) = found {
                        return Some((start + from + index, &items[from + index]));
                    }
                }
                SharedNode::Inner(children) => {
                    let mut end = start + at.items as usize;
                    for child in children.iter().rev() {
                        end -= child.items as usize;
                        stack.push((end, child));
                    }
                }
            }
        }
        None
    }
}

/// Items of consecutive ranks.
pub struct TreeRange<'a, T: TreeItem> {
    tree: &'a SharedTree<T>,
    /// Those that are not given yet.
    ranks: Range<usize>,
    /// Of these, the ones that follow in the leaf at the front.
    front: &'a [Arc<T>],
    /// And in the leaf at the back.
    back: &'a [Arc<T>],
}

impl<'a, T: TreeItem> Iterator for TreeRange<'a, T> {
    type Item = &'a Arc<T>;

    fn next(&mut self) -> Option<&'a Arc<T>> {
        let rank = self.ranks.next()?;
        if self.front.is_empty() {
            let (items, index) = self.tree.leaf_of(rank)?;
            self.front = &items[index..];
        }
        let (item, rest) = self.front.split_first()?;
        self.front = rest;
        Some(item)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.ranks.size_hint()
    }
}

impl<'a, T: TreeItem> DoubleEndedIterator for TreeRange<'a, T> {
    fn next_back(&mut self) -> Option<&'a Arc<T>> {
        let rank = self.ranks.next_back()?;
        if self.back.is_empty() {
            let (items, index) = self.tree.leaf_of(rank)?;
            self.back = &items[..=index];
        }
        let (item, rest) = self.back.split_last()?;
        self.back = rest;
        Some(item)
    }
}

impl<T: TreeItem> ExactSizeIterator for TreeRange<'_, T> {}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;
    use std::collections::BTreeMap;

    struct TestItem {
        key: u64,
        weight: u64,
    }

    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    struct TestSummary {
        sum: u64,
        most: u64,
    }

    impl TreeSummary for TestSummary {
        fn add(&mut self, other: &TestSummary) {
            self.sum += other.sum;
            self.most = self.most.max(other.most);
        }
    }

    impl TreeItem for TestItem {
        type Key = u64;
        type Summary = TestSummary;
        fn key(&self) -> &u64 {
            &self.key
        }
        fn summary(&self) -> TestSummary {
            TestSummary { sum: self.weight, most: self.weight }
        }
    }

    /// Checks a subtree, and gives its height.
    fn check_node(child: &SharedChild<TestItem>, is_root: bool) -> usize {
        assert!(is_root || !child.is_small());
        match &child.node {
            SharedNode::Leaf(items) => {
                assert!((1..=LEAF_ITEMS_MAX).contains(&items.len()));
                assert!(Arc::ptr_eq(&items[0], &child.first));
                let again = SharedChild::leaf(items);
                assert_eq!((again.items, again.summary), (child.items, child.summary));
                0
            }
            SharedNode::Inner(children) => {
                let fewest = if is_root { 2 } else { 1 };
                assert!((fewest..=INNER_CHILDREN_MAX).contains(&children.len()));
                assert!(Arc::ptr_eq(&children[0].first, &child.first));
                let again = SharedChild::inner(children);
                assert_eq!((again.items, again.summary), (child.items, child.summary));
                let heights: Vec<usize> = children.iter().map(|child| check_node(child, false)).collect();
                assert!(heights.iter().all(|&height| height == heights[0]), "one depth");
                heights[0] + 1
            }
        }
    }

    fn check(tree: &SharedTree<TestItem>, model: &BTreeMap<u64, u64>, random: &mut Prng) {
        tree.root.iter().for_each(|root| _ = check_node(root, true));
        let items: Vec<(u64, u64)> = tree.iter().map(|item| (item.key, item.weight)).collect();
        assert!(items.iter().copied().eq(model.iter().map(|(&key, &weight)| (key, weight))));
        assert_eq!((tree.len(), tree.is_empty()), (model.len(), model.is_empty()));
        assert_eq!(tree.summary().sum, model.values().sum());
        for _ in 0..8 {
            let key = random.below(5000);
            let below = model.range(..key).count();
            assert_eq!(tree.rank(&key, false), below);
            assert_eq!(tree.rank(&key, true), below + usize::from(model.contains_key(&key)));
            assert_eq!(tree.get(&key).map(|item| item.weight), model.get(&key).copied());
            assert_eq!(
                tree.floor(&key).map(|item| item.key),
                model.range(..=key).next_back().map(|it| *it.0)
            );
            assert_eq!(tree.nth(below).map(|item| item.key), model.range(key..).next().map(|it| *it.0));
            let least = random.below(1200);
            let found = tree.find_from(below, |summary| summary.most >= least);
            let wanted = model.range(key..).find(|(_, weight)| **weight >= least);
            assert_eq!(found.map(|(_, item)| item.key), wanted.map(|it| *it.0));
            assert!(found.is_none_or(|(rank, item)| items[rank].0 == item.key));
            let end = random.below(items.len() as u64 + 3) as usize;
            let start = below.min(end);
            let mut both_ways = tree.range(start..end);
            let mut wanted = items[start.min(items.len())..end.min(items.len())].iter();
            while both_ways.len() > 0 {
                let (item, key) = match random.one_in(2) {
                    true => (both_ways.next(), wanted.next()),
                    false => (both_ways.next_back(), wanted.next_back()),
                };
                assert_eq!(item.map(|item| item.key), key.map(|it| it.0));
            }
            assert!(both_ways.next().is_none() && wanted.next().is_none());
        }
    }

    #[test]
    fn random_edits_are_those_of_a_map_and_leave_older_trees_as_they_were() {
        for seed in 0..24 {
            let mut random = Prng::new(seed);
            let (mut tree, mut model) = (SharedTree::default(), BTreeMap::new());
            let mut kept: Vec<(SharedTree<TestItem>, BTreeMap<u64, u64>)> = Vec::new();
            for step in 0..120 {
                // Grows, stays, shrinks to nothing, in turns; changes lie together or apart.
                let puts = [900, 500, 100, 0][(step / 15) % 4];
                let width = [5000, 60][random.below(2) as usize];
                let start = random.below(5000 - width + 1);
                let mut changes = BTreeMap::new();
                for _ in 0..random.below(if step % 10 == 0 { 800 } else { 40 }) {
                    let is_put = random.below(1000) < puts;
                    changes.insert(start + random.below(width), is_put.then(|| random.below(1000)));
                }
                let list: Vec<TreeChange<TestItem, u64>> = changes
                    .iter()
                    .map(|(&key, weight)| match *weight {
                        Some(weight) => TreeChange::Put(Arc::new(TestItem { key, weight })),
                        None => TreeChange::Remove(key),
                    })
                    .collect();
                tree = tree.edited(&list);
                for (key, weight) in changes {
                    match weight {
                        Some(weight) => _ = model.insert(key, weight),
                        None => _ = model.remove(&key),
                    }
                }
                check(&tree, &model, &mut random);
                if random.one_in(10) {
                    kept.push((tree.clone(), model.clone()));
                }
            }
            kept.iter().for_each(|(tree, model)| check(tree, model, &mut random));
        }
    }

    #[test]
    fn a_removed_item_is_referred_to_by_no_node() {
        let items: Vec<Arc<TestItem>> = (0..3000).map(|key| Arc::new(TestItem { key, weight: 1 })).collect();
        let mut tree = SharedTree::from_sorted(&items);
        let mut random = Prng::new(1);
        let mut order: Vec<usize> = (0..items.len()).collect();
        for index in 0..order.len() {
            order.swap(index, random.below(3000) as usize);
        }
        for index in order {
            let before = tree.clone();
            tree = tree.edited(&[TreeChange::Remove(index as u64)]);
            assert!(Arc::strong_count(&items[index]) > 1, "an older tree has it");
            drop(before);
            assert_eq!(Arc::strong_count(&items[index]), 1);
        }
        assert!(tree.is_empty());
    }

    #[test]
    fn an_edit_copies_a_path_and_shares_the_rest() {
        let items: Vec<Arc<TestItem>> =
            (0..65_000).map(|key| Arc::new(TestItem { key, weight: 1 })).collect();
        let tree = SharedTree::from_sorted(&items);
        let references: Vec<usize> = items.iter().map(Arc::strong_count).collect();
        let changes: Vec<TreeChange<TestItem, u64>> = (3000..3011).map(TreeChange::Remove).collect();
        let edited = tree.edited(&changes);
        let copied =
            items.iter().zip(&references).filter(|(item, before)| Arc::strong_count(item) > **before);
        // Two leaves, and the first items below the four inner nodes of the path.
        assert!(copied.count() <= 2 * LEAF_ITEMS_MAX + 4 * INNER_CHILDREN_MAX);
        assert_eq!(edited.len(), 65_000 - 11);
    }
}
