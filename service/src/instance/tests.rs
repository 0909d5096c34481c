//! Tests of what an instance refuses by itself, whatever its layers would do.

use super::*;
use crate::leases::tests::table;
use crate::pool_memory::PoolMemory;
use crate::shares::PoolShares;
use poolfs_libservice::Memory;
use poolfs_libservice::types::OpenFlags;
use poolfs_service_protocol::StackSpec;

/// A pool's memory of which there is too little when a test says so.
#[derive(Default)]
struct MaybeShort(AtomicBool);

impl PoolMemory for MaybeShort {
    fn charge(&self, _bytes: u64) {}

    fn discharge(&self, _bytes: u64) {}

    fn is_short(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The in-memory layer gives no segments: what is refused before it is asked is refused for another cause.
#[test]
fn no_segment_is_asked_for_while_memory_is_short_or_clients_keep_it() {
    let spec = MountSpec {
        devices: true,
        suid: true,
        ..MountSpec::new("test-1", "/nowhere", StackSpec::directory("/nowhere"))
    };
    let instance = Instance::new(spec, Stack::of(Memory::new()));
    let (memory, leases) = (Arc::new(MaybeShort::default()), table(4).0);
    instance.set_leases(Arc::clone(&leases));
    instance.set_shares(&PoolShares::new(64 << 20, None, Arc::clone(&memory) as Arc<dyn PoolMemory>).join());
    let (parent, name, flags) = (NodeId::ROOT, Name::new(b"f").expect("a name"), OpenFlags::READ_ONLY);
    let created =
        instance.dispatch(&Context::fuse(0, 0, 0, 0), Request::Create { parent, name, permissions: 0o644, flags });
    let Ok(Reply::Opened { file, .. }) = created else { panic!("{created:?}") };
    let cause = || {
        let refused = instance.segment(&file).map(|_| ()).expect_err("there is none");
        assert_eq!((refused.errno(), leases.used()), (Errno::EOPNOTSUPP, 0), "nor is a lease taken");
        file.not_direct()
    };
    memory.0.store(true, Ordering::Relaxed);
    assert_eq!(cause(), Some(NotDirect::Memory));
    leases.stayed(64 << 20, 64 << 20);
    assert!(leases.suspend_if_kept());
    assert_eq!(cause(), Some(NotDirect::Kept));
    memory.0.store(false, Ordering::Relaxed);
    assert_eq!(cause(), Some(NotDirect::Kept));
    leases.resume();
    let refused = instance.segment(&file).map(|_| ()).expect_err("none by the layer");
    assert_eq!((refused.errno(), file.not_direct()), (Errno::EOPNOTSUPP, Some(NotDirect::Layers)));
    assert_eq!(instance.not_direct.lock().expect("nobody panicked").values().sum::<u64>(), 4);
}
