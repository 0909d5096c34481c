//! Tests of which writes are durable before they are answered.

use super::*;
use poolfs_libservice::Recorder;

const CRASHES: u64 = 16;

/// Whether the bytes of `file` survive every crash that may follow.
fn survives(layer: &Recorder, file: &OpenFile, bytes: &[u8]) -> bool {
    (0..CRASHES).all(|seed| {
        let disk = layer.crashed(layer.len(), seed);
        let handle = disk.open(&Caller::ROOT, file.node(), OpenFlags::READ_ONLY).expect("there");
        let mut found = vec![0; bytes.len() + 1];
        let count = disk.read(&Caller::ROOT, handle, 0, &mut found).expect("read");
        &found[..count] == bytes
    })
}

/// Writes to a new file that was opened with these flags; whether that is durable when it has been answered.
fn is_durable(context: &Context<'_>, fixture: &Fixture, layer: &Recorder, flags: OpenFlags, mode: WriteMode) -> bool {
    let file = fixture.create(&layer.len().to_string(), OpenFlags::READ_WRITE | flags);
    assert!(file.set_adopted(true));
    let request = Request::Write { file: &file, offset: 0, data: &[7; 2000], mode };
    fixture.instance.dispatch(context, request).expect("written");
    survives(layer, &file, &[7; 2000])
}

#[test]
fn a_write_is_durable_when_its_file_or_the_write_itself_asks_for_that() {
    let layer = Recorder::new();
    let fixture = Fixture::over(layer.clone());
    let (append, data, all) = (OpenFlags::APPEND, OpenFlags::DATA_SYNC, OpenFlags::DATA_SYNC | OpenFlags::FILE_SYNC);
    let library = fixture.library();
    for context in [&library, &Fixture::fuse()] {
        for append in [OpenFlags::empty(), append] {
            let durable = |flags, durability| {
                let mode = WriteMode { append: !append.is_empty(), durability, ..WriteMode::default() };
                is_durable(context, &fixture, &layer, flags | append, mode)
            };
            assert!(!durable(OpenFlags::empty(), None), "nobody has asked");
            assert!(durable(data, None) && durable(all, None));
            assert!(durable(OpenFlags::empty(), Some(Durability::Data)));
            assert!(durable(OpenFlags::empty(), Some(Durability::All)));
        }
    }
}

#[test]
fn flags_of_writes_ask_for_no_more_than_they_say() {
    let (data, all) = (OpenFlags::DATA_SYNC, OpenFlags::DATA_SYNC | OpenFlags::FILE_SYNC);
    assert_eq!(Durability::of_writes(OpenFlags::READ_WRITE | OpenFlags::APPEND), None);
    assert_eq!(Durability::of_writes(OpenFlags::FILE_SYNC), None);
    assert_eq!(Durability::of_writes(OpenFlags::WRITE_ONLY | data), Some(Durability::Data));
    assert_eq!(Durability::of_writes(OpenFlags::WRITE_ONLY | all), Some(Durability::All));
}
