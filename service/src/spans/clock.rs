//! The per-thread clock of a measurement: it counts for one layer at a time.

use crate::request::Kind;
use poolfs_service_protocol::Layer;
use rustix::time::{ClockId, clock_gettime};
use std::cell::Cell;

/// Now, on the clock by which requests say when they were submitted.
pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Times by layer, nanoseconds.
pub(super) type Times = [u64; Layer::COUNT];

struct Clock {
    running: Cell<bool>,
    layer: Cell<Layer>,
    since_ns: Cell<u64>,
    times: [Cell<u64>; Layer::COUNT],
    kind: Cell<Option<Kind>>,
}

thread_local! {
    static CLOCK: Clock = const {
        Clock {
            running: Cell::new(false),
            layer: Cell::new(Layer::Front),
            since_ns: Cell::new(0),
            times: [const { Cell::new(0) }; Layer::COUNT],
            kind: Cell::new(None),
        }
    };
}

impl Clock {
    fn turn_to(&self, layer: Layer) {
        let now = now_ns();
        let time = &self.times[self.layer.get() as usize];
        // A layer that was reached took some time, also where the clock is too coarse to show it.
        time.set(time.get() + now.saturating_sub(self.since_ns.get()).max(1));
        self.since_ns.set(now);
        self.layer.set(layer);
    }
}

/// A running clock of this thread; it stops when this is dropped.
pub(super) struct Running(());

impl Running {
    /// Starts the clock at `now_ns` for [`Layer::Front`], unless it runs.
    pub(super) fn start(now_ns: u64, kind: Option<Kind>) -> Option<Self> {
        CLOCK.with(|clock| {
            if clock.running.replace(true) {
                return None;
            }
            clock.layer.set(Layer::Front);
            clock.since_ns.set(now_ns);
            clock.times.iter().for_each(|time| time.set(0));
            clock.kind.set(kind);
            Some(Self(()))
        })
    }

    /// What was counted up to now, and of what kind the request was, if that was noted.
    pub(super) fn stop(self) -> (Times, Option<Kind>) {
        CLOCK.with(|clock| {
            clock.turn_to(Layer::Front);
            (std::array::from_fn(|layer| clock.times[layer].get()), clock.kind.get())
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        CLOCK.with(|clock| clock.running.set(false));
    }
}

/// The clock counts for another layer until this is dropped.
pub(crate) struct Entered(Option<Layer>);

impl Entered {
    /// Whom it counted for before; nothing while it does not run.
    pub(super) fn above(&self) -> Option<Layer> {
        self.0
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.0 {
            CLOCK.with(|clock| clock.turn_to(before));
        }
    }
}

/// Has this thread's clock, if it runs, count for `layer`.
#[inline]
pub(crate) fn enter(layer: Layer) -> Entered {
    CLOCK.with(|clock| {
        if !clock.running.get() {
            return Entered(None);
        }
        let before = clock.layer.get();
        clock.turn_to(layer);
        Entered(Some(before))
    })
}

/// Notes of what kind the request is that is measured, unless that is known.
pub(crate) fn note(kind: Kind) {
    CLOCK.with(|clock| {
        if clock.running.get() && clock.kind.get().is_none() {
            clock.kind.set(Some(kind));
        }
    });
}
