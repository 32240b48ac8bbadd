//! Credit windows of hosts: divides the capacity of each device among the controllers that asked, by weighted max-min fairness.
//!
//! ```text
//!   Set Features C0h ─▶ the controller has the weight of its host
//!   command on a key ─▶ hold: its cost on the device of the key, kept in its slot
//!   its end          ─▶ completion: DW1 31:16 = window of the controller, the greater of
//!                         its part of the capacity: × weight ÷ weights of the active controllers
//!                         what its other commands have, and the free tokens × weight ÷ weights of those that use up their parts
//! ```
//! In: the weights of hosts; commands that begin and end. Out: the window of a controller for a completion.
//!
//! - **Window**: the tokens that a controller may have outstanding on a device. Not tokens to send: the responses of a batch arrive together, and each would grant the same tokens again.
//! - **Active**: a controller with commands on the device. Active controllers share its *capacity* by weight. Shares of the free tokens would be smaller than one
//!   command when many hosts compete: each would then have one in flight, and engines could not commit in groups.
//! - **Unused shares** are divided, by weight, among the backlogged controllers: those that use up their own.
//!
//! Windows only bound what a host sends. The node's fair queue decides which request is next on a core, and the queue of the device executes them in that order.
//!
//! Invariants:
//! - The shares of the active controllers add up to the capacity, but for rounding up.
//! - A window exceeds its controller's share by the free tokens at most.
//! - A controller without commands does not reduce the shares of others.
//! - A hold that is dropped, with its connection or otherwise, returns its tokens.
//!
//! Passive, without a clock. Tested below, and with competing hosts in `tests/token_competition.rs`.

use octokv_wire::device_log::DeviceLog;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The most tokens that a completion has.
const TOKENS_MAX: u64 = u16::MAX as u64;

/// The commands for which a controller counts as backlogged, after one with which the next would have exceeded its share: commands of a group
/// end together, so that it has few in flight then.
const BACKLOGGED_COMMANDS: u16 = 1024;

/// A command on a key, by which its cost is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenCommand {
    /// Retrieve or Exist.
    Get,
    /// Store of so many bytes.
    Put(usize),
    /// Delete.
    Delete,
}

/// The devices of a namespace that have tokens. Shared by all cores.
pub trait TokenSource: fmt::Debug + Send + Sync {
    /// The most devices that the namespace may get.
    fn devices_max(&self) -> usize;
    /// The index of the device of a key.
    fn device_of(&self, key: &[u8]) -> u8;
    /// The tokens that may be active on a device; 0 if there is none of this index.
    fn capacity(&self, device: u8) -> u32;
    /// The free tokens of a device; 0 if there is none of this index.
    fn free_tokens(&self, device: u8) -> u32;
    /// The tokens of a command on a device, which are constant; 0 if there is none of this index.
    fn cost(&self, device: u8, command: TokenCommand) -> u32;
    /// The log page of all devices.
    fn device_log(&self) -> DeviceLog;
}

/// A controller that asked for tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareOwner {
    /// The identifier of the controller.
    pub controller: u16,
    /// The weight of its host, at least 1.
    pub weight: u32,
}

/// The tokens of a namespace, with what controllers have in flight on each device.
#[derive(Debug)]
pub struct TokenShares {
    source: Arc<dyn TokenSource>,
    devices: Box<[Mutex<DeviceShares>]>,
}

/// The controllers that are active on a device.
#[derive(Debug, Default)]
struct DeviceShares {
    /// The sum of their weights.
    weight: u64,
    /// The sum of the weights of the backlogged ones.
    backlogged_weight: u64,
    active: BTreeMap<u16, ActiveController>,
}

#[derive(Clone, Copy, Debug, Default)]
struct ActiveController {
    weight: u32,
    commands: u32,
    tokens: u64,
    /// The commands to begin until it is no more backlogged.
    backlogged_for: u16,
}

impl ActiveController {
    fn backlogged_weight(&self) -> u64 {
        if self.backlogged_for > 0 { self.weight.into() } else { 0 }
    }
}

impl DeviceShares {
    /// Changes a controller, which is removed without commands.
    fn update(&mut self, controller: u16, change: impl FnOnce(&mut ActiveController, u64)) {
        let own = self.active.entry(controller).or_default();
        self.weight -= u64::from(own.weight);
        self.backlogged_weight -= own.backlogged_weight();
        change(own, self.weight);
        self.weight += u64::from(own.weight);
        self.backlogged_weight += own.backlogged_weight();
        if own.commands == 0 {
            self.weight -= u64::from(own.weight);
            self.backlogged_weight -= own.backlogged_weight();
            self.active.remove(&controller);
        }
    }
}

/// The part of tokens that a weight has among others, rounded up.
fn part_of(tokens: u32, weight: u32, others: u64) -> u64 {
    let weight = u64::from(weight);
    (u64::from(tokens) * weight).div_ceil((others + weight).max(1))
}

/// A command of a controller on a device, until it ends or is dropped.
#[derive(Debug)]
pub struct TokenHold {
    shares: Arc<TokenShares>,
    controller: u16,
    device: u8,
    tokens: u32,
}

impl TokenShares {
    /// The shares of devices without commands.
    pub fn new(source: Arc<dyn TokenSource>) -> Arc<TokenShares> {
        let devices = (0..source.devices_max()).map(|_| Mutex::default()).collect();
        Arc::new(TokenShares { source, devices })
    }

    /// A command of a controller arrived. `None` if its key has no device with tokens.
    pub fn begin(
        self: &Arc<TokenShares>,
        owner: ShareOwner,
        key: &[u8],
        command: TokenCommand,
    ) -> Option<TokenHold> {
        let device = self.source.device_of(key);
        let tokens = self.source.cost(device, command);
        let shares = self.devices.get(usize::from(device))?;
        let capacity = self.source.capacity(device);
        shares.lock().update(owner.controller, |own, others| {
            own.weight = owner.weight;
            own.commands += 1;
            own.tokens += u64::from(tokens);
            let uses_up = own.tokens + u64::from(tokens) > part_of(capacity, owner.weight, others);
            own.backlogged_for =
                if uses_up { BACKLOGGED_COMMANDS } else { own.backlogged_for.saturating_sub(1) };
        });
        Some(TokenHold { shares: Arc::clone(self), controller: owner.controller, device, tokens })
    }

    /// The tokens that a controller may have outstanding on a device, at most 65535.
    pub fn window_of(&self, owner: ShareOwner, device: u8) -> u32 {
        let Some(shares) = self.devices.get(usize::from(device)) else { return 0 };
        let shares = shares.lock();
        let own = shares.active.get(&owner.controller).copied().unwrap_or_default();
        let others = shares.weight - u64::from(own.weight);
        let backlogged_others = shares.backlogged_weight - own.backlogged_weight();
        drop(shares);
        let part = part_of(self.source.capacity(device), owner.weight, others);
        let of_free = part_of(self.source.free_tokens(device), owner.weight, backlogged_others);
        part.max(own.tokens + of_free).min(TOKENS_MAX) as u32
    }

    /// The log page of all devices, for a host; with its windows in place of free tokens, and none if it has not asked.
    pub(crate) fn device_log(&self, owner: Option<ShareOwner>) -> DeviceLog {
        let mut log = self.source.device_log();
        for (entry, device) in log.devices.iter_mut().zip(0..) {
            entry.free = owner.map_or(0, |owner| self.window_of(owner, device));
        }
        log
    }
}

impl TokenHold {
    /// The command ended: the window of its controller on the device.
    pub fn end(self, weight: u32) -> u32 {
        let (shares, device) = (Arc::clone(&self.shares), self.device);
        let owner = ShareOwner { controller: self.controller, weight };
        drop(self);
        shares.window_of(owner, device)
    }
}

impl Drop for TokenHold {
    fn drop(&mut self) {
        let shares = &self.shares.devices[usize::from(self.device)];
        shares.lock().update(self.controller, |own, _| {
            own.commands -= 1;
            own.tokens -= u64::from(self.tokens);
        });
    }
}

/// The weight of a controller in the tokens of all devices.
#[derive(Debug, Default)]
pub(crate) struct TokenWeight(AtomicU32);

impl TokenWeight {
    /// Sets the weight; 0 if the controller does not ask for tokens.
    pub fn set(&self, weight: u32) {
        self.0.store(weight, Ordering::Relaxed);
    }

    /// The weight; 0 if the controller does not ask for tokens.
    #[inline]
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One device with a capacity and free tokens; a Get costs 16 and a Put 64.
    #[derive(Debug)]
    struct TestSource {
        capacity: u32,
        free: AtomicU32,
    }

    impl TokenSource for TestSource {
        fn devices_max(&self) -> usize {
            1
        }
        fn device_of(&self, key: &[u8]) -> u8 {
            key[0]
        }
        fn capacity(&self, _device: u8) -> u32 {
            self.capacity
        }
        fn free_tokens(&self, _device: u8) -> u32 {
            self.free.load(Ordering::Relaxed)
        }
        fn cost(&self, _device: u8, command: TokenCommand) -> u32 {
            if command == TokenCommand::Get { 16 } else { 64 }
        }
        fn device_log(&self) -> DeviceLog {
            unreachable!("not read")
        }
    }

    fn shares(capacity: u32, free: u32) -> (Arc<TokenShares>, Arc<TestSource>) {
        let source = Arc::new(TestSource { capacity, free: AtomicU32::new(free) });
        (TokenShares::new(Arc::clone(&source) as Arc<dyn TokenSource>), source)
    }

    fn owner(controller: u16, weight: u32) -> ShareOwner {
        ShareOwner { controller, weight }
    }

    #[test]
    fn active_controllers_have_windows_of_the_capacity_by_weight() {
        let (shares, _) = shares(512, 0);
        let [a, b] = [owner(1, 3), owner(2, 1)];
        assert_eq!((shares.window_of(a, 0), shares.window_of(b, 0)), (512, 512), "each is alone");
        let begin = |owner| shares.begin(owner, &[0], TokenCommand::Put(1)).expect("has tokens");
        let (one, other) = (begin(a), begin(b));
        assert_eq!((shares.window_of(a, 0), shares.window_of(b, 0)), (384, 128));
        let more: Vec<_> = (0..5).map(|_| begin(a)).collect();
        assert_eq!((shares.window_of(a, 0), shares.window_of(b, 0)), (384, 128));
        let above = begin(a);
        assert_eq!(one.end(3), 384, "whatever it has in flight");
        assert_eq!(other.end(1), 128);
        assert_eq!(shares.window_of(a, 0), 512, "the other is not active");
        drop((more, above));
        assert_eq!((shares.window_of(a, 0), shares.window_of(b, 0)), (512, 512));
    }

    #[test]
    fn a_window_is_at_least_one_token_and_all_windows_are_the_capacity() {
        let (shares, _) = shares(512, 0);
        let begin = |controller| shares.begin(owner(controller, 1), &[0], TokenCommand::Get);
        let holds: Vec<_> = (0..600).map(begin).collect();
        assert_eq!(holds.iter().flatten().count(), 600);
        assert_eq!(shares.window_of(owner(700, 1), 0), 1);
        assert_eq!(shares.window_of(owner(700, 600), 0), 256);
    }

    #[test]
    fn what_light_controllers_leave_is_divided_among_those_that_use_up_their_parts() {
        let (shares, source) = shares(512, 300);
        let [a, b, light] = [owner(1, 3), owner(2, 1), owner(3, 1)];
        let begin = |owner| shares.begin(owner, &[0], TokenCommand::Get);
        let _light = begin(light);
        let gets: Vec<_> = (0..20).map(|_| begin(a)).collect();
        assert_eq!((gets.len(), shares.window_of(a, 0)), (20, 320 + 300), "the other is light");
        let _more: Vec<_> = (0..7).map(|_| begin(b)).collect();
        let _again = begin(a);
        assert_eq!(shares.window_of(a, 0), 336 + 225, "the other uses up its part of 103, too");
        assert_eq!((shares.window_of(b, 0), shares.window_of(light, 0)), (112 + 75, 103));
        source.free.store(0, Ordering::Relaxed);
        assert_eq!([a, b, light].map(|one| shares.window_of(one, 0)), [336, 112, 103]);
        source.free.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(shares.window_of(a, 0), 65535);
    }

    #[test]
    fn a_weight_that_changes_counts_from_the_next_command_on() {
        let (shares, _) = shares(512, 0);
        let first = shares.begin(owner(1, 1), &[0], TokenCommand::Delete);
        let other = shares.begin(owner(2, 1), &[0], TokenCommand::Delete);
        let second = shares.begin(owner(1, 3), &[0], TokenCommand::Delete);
        assert_eq!(shares.window_of(owner(2, 1), 0), 128);
        drop((first, second));
        assert_eq!(shares.window_of(owner(2, 1), 0), 512);
        drop(other);
        assert_eq!(shares.devices[0].lock().weight, 0);
        assert!(shares.begin(owner(1, 1), &[9], TokenCommand::Get).is_none(), "there is no such device");
        assert_eq!(shares.window_of(owner(1, 1), 9), 0);
    }
}
