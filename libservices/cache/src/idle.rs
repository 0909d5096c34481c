//! The count of idle nodes (nodes without references) in all layers of a pool: it is bounded for the pool, however many layers
//! there are.

use crate::sync::lock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// A layer of the pool, as far as others in which more happens ask something of it.
pub(crate) trait Layer: Send + Sync {
    /// Looks at up to `steps` idle nodes, the longest idle first, and drops those that are still idle and clean.
    fn trim(&self, steps: usize);

    /// Drops the answers of the layer below that are kept beside its nodes.
    fn give_up_answers(&self);
}

/// The count, and the layers that hold them.
#[derive(Default)]
pub(crate) struct IdleNodes {
    count: AtomicUsize,
    layers: Mutex<Layers>,
}

#[derive(Default)]
struct Layers {
    all: Vec<Weak<dyn Layer>>,
    next: usize,
}

impl IdleNodes {
    /// A layer that may come to hold some.
    pub(crate) fn add(&self, layer: Weak<dyn Layer>) {
        let mut layers = lock(&self.layers);
        layers.all.retain(|layer| layer.strong_count() > 0);
        layers.all.push(layer);
    }

    /// Counts one more; how many there are then.
    pub(crate) fn count_one_more(&self) -> usize {
        self.count.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn count_less(&self, nodes: usize) {
        self.count.fetch_sub(nodes, Ordering::Relaxed);
    }

    /// The layers in turn.
    pub(crate) fn next(&self) -> Option<Arc<dyn Layer>> {
        let mut layers = lock(&self.layers);
        layers.next = (layers.next + 1) % layers.all.len().max(1);
        layers.all.get(layers.next)?.upgrade()
    }

    /// All of them.
    pub(crate) fn layers(&self) -> Vec<Arc<dyn Layer>> {
        lock(&self.layers).all.iter().filter_map(Weak::upgrade).collect()
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use crate::{Cache, CacheConfig, CachePool};
    use poolfs_libservice::{Libservice, Memory};
    use poolfs_types::{Caller, Name, NodeId, RenameFlags};
    use std::sync::Arc;

    const NODES_MAX: usize = 100;

    fn make_directories(cache: &Cache, count: usize) {
        for number in 0..count {
            let name = format!("d{number}");
            let name = Name::new(name.as_bytes()).unwrap();
            let entry = cache.mkdir(&Caller::ROOT, NodeId::ROOT, name, 0o755).unwrap();
            cache.forget(entry.node, 1);
        }
    }

    #[test]
    fn what_is_removed_and_forgotten_is_let_go_of_below() {
        let below = Memory::new();
        let pool = CachePool::new(CacheConfig::with_limit(1 << 20)).unwrap();
        let cache = Cache::new(&pool, Arc::clone(&below) as Arc<dyn Libservice>);
        let name = |text: &'static str| Name::new(text.as_bytes()).unwrap();
        let [one, other] = [name("one"), name("other")];
        let make = |name| cache.mkdir(&Caller::ROOT, NodeId::ROOT, name, 0o755).unwrap().node;
        // Forgotten after it is removed, before, and when it is replaced.
        let node = make(one);
        cache.rmdir(&Caller::ROOT, NodeId::ROOT, one).unwrap();
        cache.forget(node, 1);
        assert_eq!(below.outstanding(), (0, 0));
        cache.forget(make(one), 1);
        cache.rmdir(&Caller::ROOT, NodeId::ROOT, one).unwrap();
        assert_eq!(below.outstanding(), (0, 0));
        cache.forget(make(other), 1);
        let kept = make(one);
        cache.rename(&Caller::ROOT, NodeId::ROOT, one, NodeId::ROOT, other, RenameFlags::empty()).unwrap();
        assert_eq!(below.outstanding().0, 1, "the replaced directory is still held");
        cache.forget(kept, 1);
        cache.rmdir(&Caller::ROOT, NodeId::ROOT, other).unwrap();
        assert_eq!(below.outstanding(), (0, 0));
    }

    #[test]
    fn idle_nodes_are_bounded_for_all_layers_together() {
        let config = CacheConfig { idle_nodes_max: NODES_MAX, ..CacheConfig::with_limit(1 << 20) };
        let pool = CachePool::new(config).unwrap();
        let below = [(); 4].map(|()| Memory::new());
        let layers = below.each_ref().map(|memory| Cache::new(&pool, Arc::clone(memory) as Arc<dyn Libservice>));
        let mut known = Vec::new();
        for layer in &layers {
            make_directories(layer, 2 * NODES_MAX);
            known.push(layers.each_ref().map(|layer| layer.core.nodes().len() - 1));
        }
        for now in &known {
            assert!(now.iter().sum::<usize>() <= NODES_MAX, "{known:?}");
        }
        assert_eq!(pool.pool.idle.count(), known[3].iter().sum::<usize>());
        drop(layers);
        assert_eq!(pool.pool.idle.count(), 0);
        for memory in below {
            assert_eq!(memory.outstanding(), (0, 0));
        }
    }
}
