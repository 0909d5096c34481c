//! Inline places: a file with few units has their places in its record instead of a table.

use crate::decoding::{Cause, array};

/// Most places that stand in a record: with them it has 384 bytes, a tenth of the block that a filesystem has for all attributes of a file.
pub(crate) const INLINE_MAX: usize = 40;
/// Bytes of a place as it is stored: a unit's number, and where it begins.
pub(crate) const PLACE_BYTES: usize = 8;

/// Where the units of a file are, in the order of their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inline {
    /// the number of a unit, and its first block
    places: Vec<(u32, u32)>,
}

impl Inline {
    /// Units and their first blocks, in the order of the units.
    pub fn places(&self) -> impl DoubleEndedIterator<Item = (u64, u32)> + '_ {
        self.places.iter().map(|&(index, block)| (u64::from(index), block))
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_full(&self) -> bool {
        self.places.len() >= INLINE_MAX
    }

    fn find(&self, index: u64) -> Result<usize, usize> {
        self.places.binary_search_by_key(&index, |&(index, _)| u64::from(index))
    }

    pub fn get(&self, index: u64) -> Option<u32> {
        self.find(index).ok().map(|at| self.places[at].1)
    }

    /// Notes a place, 0 for none; whether there was room for it, and the number can be one.
    pub fn set(&mut self, index: u64, block: u32) -> bool {
        match (self.find(index), u32::try_from(index)) {
            (Ok(at), _) if block == 0 => drop(self.places.remove(at)),
            (Ok(at), _) => self.places[at].1 = block,
            (Err(_), _) if block == 0 => {}
            (Err(at), Ok(index)) if self.places.len() < INLINE_MAX => self.places.insert(at, (index, block)),
            (Err(_), _) => return false,
        }
        true
    }

    /// The first unit at or behind `index` that has a place.
    pub fn next(&self, index: u64) -> Option<u64> {
        let (Ok(at) | Err(at)) = self.find(index);
        self.places.get(at).map(|&(index, _)| u64::from(index))
    }

    /// Takes away the units from `index` on; their first blocks.
    pub fn cut(&mut self, index: u64) -> Vec<u32> {
        let (Ok(at) | Err(at)) = self.find(index);
        self.places.drain(at..).map(|(_, block)| block).collect()
    }

    /// As they stand in the record.
    pub fn encode(&self) -> Vec<u8> {
        self.places.iter().flat_map(|(index, block)| [index.to_le_bytes(), block.to_le_bytes()]).flatten().collect()
    }

    /// What stands in `bytes`, of a file of at most `units` units of `blocks` blocks.
    ///
    /// # Errors
    /// What is wrong with it: more places than there may be, in another order, of units that cannot be, at blocks that cannot be, or two in one.
    pub fn decode(bytes: &[u8], units: u64, blocks: u32) -> Result<Self, Cause> {
        if !bytes.len().is_multiple_of(PLACE_BYTES) || bytes.len() > INLINE_MAX * PLACE_BYTES {
            return Err(format!("its record has {} bytes of places", bytes.len()));
        }
        let number = |place, at| u32::from_le_bytes(array(place, at));
        let places: Vec<_> =
            bytes.chunks_exact(PLACE_BYTES).map(|place| (number(place, 0), number(place, 4))).collect();
        if let Some(pair) = places.windows(2).find(|pair| pair[0].0 >= pair[1].0) {
            return Err(format!("its record names unit {} behind unit {}", pair[1].0, pair[0].0));
        }
        let cannot_be = |&&(index, block): &&(u32, u32)| {
            u64::from(index) >= units || block == 0 || block.checked_add(blocks).is_none()
        };
        if let Some((index, block)) = places.iter().find(cannot_be) {
            return Err(format!("its record says that unit {index} is at block {block}"));
        }
        let mut firsts: Vec<u32> = places.iter().map(|&(_, block)| block).collect();
        firsts.sort_unstable();
        if let Some(pair) = firsts.windows(2).find(|pair| pair[1] - pair[0] < blocks) {
            return Err(format!("its record has two units in block {}", pair[1]));
        }
        Ok(Inline { places })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(places: &[(u32, u32)]) -> Inline {
        Inline { places: places.to_vec() }
    }

    #[test]
    fn places_are_found_changed_and_taken_away() {
        let mut inline = Inline::default();
        for at in (0..INLINE_MAX as u64).rev() {
            assert!(inline.set(at * 3, at as u32 + 1));
        }
        assert!(!inline.set(1, 99), "it is full");
        assert!(inline.set(3, 99) && inline.set(1, 0));
        assert_eq!((inline.get(3), inline.get(1), inline.get(6)), (Some(99), None, Some(3)));
        assert_eq!((inline.next(3), inline.next(4), inline.next(1 << 40)), (Some(3), Some(6), None));
        assert!(inline.set(3, 0) && !inline.set(1 << 32, 5) && inline.set(1, 5));
        assert_eq!(inline.places().take(3).collect::<Vec<_>>(), [(0, 1), (1, 5), (6, 3)]);
        assert_eq!(inline.cut(7).len(), INLINE_MAX - 3);
        assert_eq!((inline.cut(1), inline.len()), (vec![5, 3], 1));
    }

    #[test]
    fn what_cannot_be_is_damage() {
        let sound = of(&[(0, 9), (7, 1), (99, 5)]);
        assert_eq!(Inline::decode(&sound.encode(), 100, 4), Ok(sound.clone()));
        assert_eq!(Inline::decode(&[], 100, 4), Ok(Inline::default()));
        let wrong = [
            (of(&[(7, 1), (0, 9)]), "an order"),
            (of(&[(7, 1), (7, 9)]), "a unit twice"),
            (of(&[(100, 1)]), "a unit behind the last"),
            (of(&[(1, 0)]), "block 0"),
            (of(&[(1, u32::MAX - 2)]), "an end behind the last block"),
            (of(&[(1, 5), (2, 5)]), "a block twice"),
            (of(&[(1, 5), (2, 8)]), "units that overlap"),
            (of(&[(1, 5), (2, 2)]), "and in the other order"),
        ];
        for (inline, what) in wrong {
            assert!(Inline::decode(&inline.encode(), 100, 4).is_err(), "{what}");
        }
        let most: Vec<_> = (0..=INLINE_MAX as u32).map(|at| (at, at * 4 + 1)).collect();
        assert!(Inline::decode(&of(&most[..INLINE_MAX]).encode(), 100, 4).is_ok());
        assert!(Inline::decode(&of(&most).encode(), 100, 4).is_err(), "too many");
        assert!(Inline::decode(&sound.encode()[..20], 100, 4).is_err(), "half a place");
    }
}
