//! Blocks signals while something is half done that no other call could complete.
//!
//! A handler may leave the call it interrupted by `siglongjmp`. What that call had borrowed is recovered by its
//! [`Hold`](poolfs_ipc::hold::Hold). An open descriptor or mapping that is not yet recorded anywhere is not recovered, and neither is a
//! state that only the caller that set it ends. Such steps are rare, and bounded in time.

use crate::raw;

/// The calling thread's signals wait while this lives.
pub struct SignalsHeld {
    /// The mask to go back to; nothing when the kernel refused.
    before: Option<u64>,
}

impl SignalsHeld {
    /// Holds them back.
    pub fn hold() -> Self {
        Self { before: raw::replace_signal_mask(u64::MAX).ok() }
    }
}

impl Drop for SignalsHeld {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // It was possible a moment ago.
            raw::replace_signal_mask(before).ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked() -> u64 {
        let now = raw::replace_signal_mask(0).expect("a mask");
        raw::replace_signal_mask(now).expect("a mask");
        now
    }

    #[test]
    fn signals_wait_until_the_last_who_holds_them_lets_go() {
        let before = blocked();
        let outer = SignalsHeld::hold();
        let all = blocked();
        assert_ne!(all, before);
        drop(SignalsHeld::hold());
        assert_eq!(blocked(), all, "the inner one let the outer one's go");
        drop(outer);
        assert_eq!(blocked(), before);
    }
}
