//! Path lookup: which paths lead into an instance, and how a request for one is made.
//!
//! Served are absolute paths and those relative to an adopted directory. Left to the kernel are paths relative to the working directory,
//! with `..`, with a slash at the end, those that cross a mount point, and those through a mount of only a part of an instance. The service
//! answers a symbolic link with the path to go on with. That path is looked up anew, because it may lead anywhere.

use crate::cached_clock::CachedClock;
use crate::descriptor_path::path_of;
use crate::files::{OpenFile, open_file};
use crate::memory::{UserMemory, UserPath};
use crate::mounts::{Freshness, MountPoint, Table, components};
use crate::outcome::{Refusal, Served};
use crate::state::{Call, State};
use crate::trace::Reason;
use linux_raw_sys::general as sys;
use poolfs_ipc::Borrowed;
use poolfs_ipc::wire::{Reply, Request, Status};
use poolfs_types::Errno;
use poolfs_types::limits::{PATH_MAX, SYMLINKS_MAX};

/// A directory's own path longer than this is left to the kernel.
const DIRECTORY_PATH_BYTES: usize = 1024;

/// Where a path begins that is not absolute: an adopted directory, or nowhere we know.
pub type Start<'a> = Option<OpenFile<'a>>;

/// A path that leads into an instance.
#[derive(Clone, Copy)]
pub struct Location<'p> {
    /// The mount it leads through.
    pub mount: MountPoint,
    directory: Option<(u64, u64)>,
    text: &'p [u8],
    skip: usize,
}

/// What a request carries beside its fixed part.
#[derive(Clone, Copy, Default)]
pub struct Extra<'a> {
    /// A name or a link's target.
    pub second: &'a [u8],
    /// A value.
    pub third: Option<UserMemory>,
}

/// Takes what a served request brought.
pub type Take<'t> = &'t mut dyn FnMut(&Reply, &Borrowed<'_>, &MountPoint);

/// Whether a look at a path's first names tells that it leads into no instance. Most calls of most programs end here, and what
/// it costs is all that they pay for the library.
#[inline]
pub fn is_elsewhere(state: &State, at: (i32, UserPath)) -> bool {
    let turn = CachedClock::here();
    let head = turn.late_time_ns().and_then(|late| at.1.head_known(late).map(|head| (head, late)));
    head.is_some_and(|(head, late)| leads_nowhere(state, at.0, head, late)) || is_elsewhere_now(state, at, turn)
}

/// The same, by the time as it is.
#[inline(never)]
fn is_elsewhere_now(state: &State, (descriptor, path): (i32, UserPath), turn: &CachedClock) -> bool {
    let now = turn.time_ns();
    path.head(now).is_none_or(|head| leads_nowhere(state, descriptor, head, now))
}

#[inline(always)]
fn leads_nowhere(state: &State, descriptor: i32, head: &[u8], now: u64) -> bool {
    match head.first() {
        Some(b'/') => state.mounts.is_elsewhere(head, now),
        _ => state.descriptors.is_foreign(descriptor),
    }
}

/// The start of the paths relative to `descriptor`.
pub fn start<'a>(call: Call, descriptor: i32, path: &[u8]) -> Served<Start<'a>> {
    if path.first() == Some(&b'/') {
        return Ok(None);
    }
    if path.is_empty() || descriptor < 0 {
        return Err(Refusal::Foreign);
    }
    let file = open_file(call, descriptor)?;
    if file.is_directory() { Ok(Some(file)) } else { Err(Refusal::Kernel) }
}

/// Where a path leads.
///
/// # Errors
/// [`Refusal::Foreign`] or [`Refusal::Kernel`] when it is to be left to the kernel.
pub fn locate<'p>(call: Call, start: &Start<'_>, text: &'p [u8]) -> Served<Location<'p>> {
    if text.first() == Some(&b'/') {
        return locate_absolute(call, text);
    }
    let directory = start.as_ref().ok_or(Refusal::Foreign)?;
    if !is_plain(text) || components(text).next().is_none() || !is_whole(call, &directory.mount) {
        return Err(Refusal::left(Reason::Path));
    }
    let crosses = call.state.mounts.with(call.began.frame, Freshness::Exact, |table| {
        let mount = table.by_id(directory.mount.id)?;
        if !table.has_mounts_below(mount) {
            return Some(false);
        }
        leads_elsewhere(table, mount.id, directory.descriptor, text)
    });
    if crosses.flatten() != Some(false) {
        return Err(Refusal::left(Reason::OtherMount));
    }
    let handle = (directory.adopted.handle, directory.session.generation);
    Ok(Location { mount: directory.mount, directory: Some(handle), text, skip: 0 })
}

fn locate_absolute<'p>(call: Call, text: &'p [u8]) -> Served<Location<'p>> {
    let find = |freshness| {
        let find = |table: &Table| {
            let (mount, skip) = table.locate(components(text))?;
            mount.instance().map(|_| (*mount, skip, table.root(mount) == b"/"))
        };
        call.state.mounts.with(call.began.frame, freshness, find).flatten()
    };
    find(Freshness::Lazy).ok_or(Refusal::Foreign)?;
    if !is_plain(text) {
        return Err(Refusal::left(Reason::Path));
    }
    match find(Freshness::Exact) {
        Some((mount, skip, true)) if components(text).count() > skip => {
            Ok(Location { mount, directory: None, text, skip })
        }
        _ => Err(Refusal::left(Reason::Path)),
    }
}

/// Whether the mount shows an instance from its root.
fn is_whole(call: Call, mount: &MountPoint) -> bool {
    let whole = |table: &Table| table.by_id(mount.id).is_some_and(|mount| table.root(mount) == b"/");
    call.state.mounts.with(call.began.frame, Freshness::Lazy, whole).unwrap_or(false)
}

/// Whether a path means the same by its components as by the kernel's walk: no `..`, and nothing that asks for a
/// directory at its end.
fn is_plain(text: &[u8]) -> bool {
    let mut last: &[u8] = b"";
    for name in text.split(|&byte| byte == b'/') {
        if name == b".." {
            return false;
        }
        last = name;
    }
    !last.is_empty() && last != b"."
}

/// Whether `text`, from the directory behind `descriptor`, leads out of its mount; nothing when that cannot be told.
fn leads_elsewhere(table: &Table, mount: u64, descriptor: i32, text: &[u8]) -> Option<bool> {
    let mut path = [0; DIRECTORY_PATH_BYTES];
    let path = path_of(descriptor, &mut path)?;
    if path.ends_with(b" (deleted)") {
        return None;
    }
    let (found, _) = table.locate(components(path).chain(components(text)))?;
    Some(found.id != mount)
}

/// Writes the path of a location to the data area at `offset`; returns its length.
fn put_path(borrowed: &mut Borrowed<'_>, offset: usize, location: &Location<'_>) -> Served<usize> {
    let mut length = 0;
    for name in components(location.text).skip(location.skip) {
        if length > 0 {
            put(borrowed, offset + length, b"/")?;
            length += 1;
        }
        put(borrowed, offset + length, name)?;
        length += name.len();
    }
    if length > PATH_MAX { Err(Refusal::Kernel) } else { Ok(length) }
}

fn put(borrowed: &mut Borrowed<'_>, offset: usize, bytes: &[u8]) -> Served<()> {
    borrowed.put_data(offset, bytes).map_err(|_| Refusal::Kernel)
}

/// One request for one or two paths, without following what it answers.
fn once(
    call: Call,
    places: (&Location<'_>, Option<&Location<'_>>),
    template: &Request,
    extra: &Extra<'_>,
    answered: &mut dyn FnMut(&Reply, &Borrowed<'_>) -> Served<()>,
) -> Served<()> {
    let (first, second) = places;
    let instance = first.mount.instance().ok_or(Refusal::Foreign)?;
    if second.is_some_and(|second| second.mount.id != first.mount.id) {
        return Err(Refusal::Kernel);
    }
    let session = call.state.sessions.enter(call.began, instance).ok_or_else(|| Refusal::left(Reason::NoSession))?;
    if !session.serves(&first.mount) {
        return Err(Refusal::Kernel);
    }
    let directory = |location: &Location<'_>| match location.directory {
        None => Ok(0),
        Some((handle, generation)) if generation == session.generation => Ok(handle),
        Some(_) => Err(Refusal::Kernel),
    };
    let mut request = *template;
    let mut borrowed = session.borrow()?;
    request.directory = directory(first)?;
    let mut length = put_path(&mut borrowed, 0, first)?;
    request.path_length = length as u32;
    if let Some(second) = second {
        request.second_directory = directory(second)?;
        request.second_length = put_path(&mut borrowed, length, second)? as u32;
    } else {
        put(&mut borrowed, length, extra.second)?;
        request.second_length = extra.second.len() as u32;
    }
    length += request.second_length as usize;
    put_value(&mut borrowed, length, extra, &mut request)?;
    let reply = session.execute(&mut borrowed, &request)?;
    answered(&reply, &borrowed)
}

/// Writes the value of an extended attribute behind the strings.
pub fn put_value(borrowed: &mut Borrowed<'_>, offset: usize, extra: &Extra<'_>, request: &mut Request) -> Served<()> {
    let Some(value) = extra.third else { return Ok(()) };
    request.third_length = value.length() as u32;
    // SAFETY: the application's own memory, readable for the call it was passed to.
    unsafe { borrowed.put_data_raw(offset, value.address() as *const u8, value.length()) }.map_err(|_| Refusal::Kernel)
}

/// A request by one path.
///
/// # Errors
/// What the service answers, or a refusal.
pub fn by_path(
    call: Call,
    at: (i32, UserPath),
    changes: bool,
    request: &Request,
    extra: &Extra<'_>,
    take: Take<'_>,
) -> Served<Reply> {
    let text = at.1.bytes().ok_or(Refusal::Foreign)?;
    let start = start(call, at.0, text)?;
    run(call, (&start, text), None, changes, request, extra, take)
}

/// A request by two paths, of one mount.
///
/// # Errors
/// What the service answers, or a refusal.
pub fn by_two_paths(call: Call, first: (i32, UserPath), second: (i32, UserPath), request: &Request) -> Served<Reply> {
    let first_text = first.1.bytes().ok_or(Refusal::Foreign)?;
    let second_text = second.1.bytes().ok_or(Refusal::Foreign)?;
    let start_first = start(call, first.0, first_text)?;
    let start_second = start(call, second.0, second_text)?;
    let second = Some((&start_second, second_text));
    run(call, (&start_first, first_text), second, true, request, &Extra::default(), &mut |_, _, _| {})
}

type Named<'n, 's> = (&'n Start<'s>, &'n [u8]);

fn run(
    call: Call,
    first: Named<'_, '_>,
    second: Option<Named<'_, '_>>,
    changes: bool,
    request: &Request,
    extra: &Extra<'_>,
    take: Take<'_>,
) -> Served<Reply> {
    let (place, second_place) = places(call, first, second, changes)?;
    let mut result = Err(Refusal::Kernel);
    once(call, (&place, second_place.as_ref()), request, extra, &mut |reply, borrowed| {
        result = if reply.status == Status::Done as u32 {
            take(reply, borrowed, &place.mount);
            Ok(*reply)
        } else {
            let skips = (place.skip, second_place.as_ref().map_or(0, |second| second.skip));
            follow(call, (first, second, changes), skips, (request, extra), (reply, borrowed), take)
        };
        Ok(())
    })?;
    result
}

type Places<'n> = (Location<'n>, Option<Location<'n>>);

fn places<'n>(call: Call, first: Named<'n, '_>, second: Option<Named<'n, '_>>, changes: bool) -> Served<Places<'n>> {
    let place = locate(call, first.0, first.1)?;
    let second = second.map(|(start, text)| locate(call, start, text)).transpose()?;
    if changes && place.mount.is_read_only() {
        return Err(Refusal::Kernel);
    }
    Ok((place, second))
}

/// A path that a symbolic link made.
struct Text {
    bytes: [u8; PATH_MAX],
    length: usize,
}

impl Text {
    fn of(text: &[u8]) -> Self {
        let mut new = Self { bytes: [0; PATH_MAX], length: 0 };
        new.set(text);
        new
    }

    fn set(&mut self, text: &[u8]) {
        self.length = text.len().min(PATH_MAX);
        self.bytes[..self.length].copy_from_slice(&text[..self.length]);
    }

    fn take(&mut self, reply: &Reply, borrowed: &Borrowed<'_>) -> Served<()> {
        let length = usize::try_from(reply.length).ok().filter(|length| (1..=PATH_MAX).contains(length));
        self.length = length.ok_or(Refusal::Kernel)?;
        borrowed.get_data(0, &mut self.bytes[..self.length]).map_err(|_| Refusal::Kernel)
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Goes on with what a symbolic link on this path made of it. What is relative is so to where the request began: at the
    /// same directory, or behind the first `skip` components of an absolute path, which lead to the mount.
    fn go_on(&mut self, next: &Self, skip: usize) -> Served<()> {
        if next.bytes().first() == Some(&b'/') || self.bytes().first() != Some(&b'/') {
            self.set(next.bytes());
            return Ok(());
        }
        let names = components(self.bytes()).take(skip);
        let end = names.last().map_or(0, |name| name.as_ptr().addr() - self.bytes.as_ptr().addr() + name.len());
        let length = end + 1 + next.length;
        let rest = self.bytes.get_mut(end..length).ok_or(Refusal::Kernel)?;
        rest[0] = b'/';
        rest[1..].copy_from_slice(next.bytes());
        self.length = length;
        Ok(())
    }
}

/// Goes on after symbolic links. Apart from [`run`], because of the room two paths take on the stack.
#[cold]
#[inline(never)]
fn follow(
    call: Call,
    (first, second, changes): (Named<'_, '_>, Option<Named<'_, '_>>, bool),
    mut skips: (usize, usize),
    (request, extra): (&Request, &Extra<'_>),
    (reply, borrowed): (&Reply, &Borrowed<'_>),
    take: Take<'_>,
) -> Served<Reply> {
    let mut text = Text::of(first.1);
    let mut second_text = Text::of(second.map_or(b"", |(_, text)| text));
    let mut next = Text::of(b"");
    next.take(reply, borrowed)?;
    let mut last = *reply;
    for _ in 0..SYMLINKS_MAX {
        if last.status == Status::Redirect as u32 {
            text.go_on(&next, skips.0)?;
        } else {
            second_text.go_on(&next, skips.1)?;
        }
        let named = second.map(|(start, _)| (start, second_text.bytes()));
        let (place, second_place) = places(call, (first.0, text.bytes()), named, changes)?;
        skips = (place.skip, second_place.as_ref().map_or(0, |second| second.skip));
        once(call, (&place, second_place.as_ref()), request, extra, &mut |reply, borrowed| {
            last = *reply;
            if reply.status == Status::Done as u32 {
                take(reply, borrowed, &place.mount);
                return Ok(());
            }
            next.take(reply, borrowed)
        })?;
        if last.status == Status::Done as u32 {
            return Ok(last);
        }
    }
    Err(Refusal::Failed(Errno::ELOOP))
}

/// The descriptor that stands for the working directory.
pub const WORKING_DIRECTORY: i32 = sys::AT_FDCWD;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_paths_are_served() {
        for plain in ["/a", "/a/b", "//a/./b", "a", "a/...", "/.a"] {
            assert!(is_plain(plain.as_bytes()), "{plain}");
        }
        for other in ["/", "", "/a/", "/a/..", "/a/../b", "..", ".", "/a/."] {
            assert!(!is_plain(other.as_bytes()), "{other}");
        }
    }

    fn gone_on(text: &[u8], next: &[u8], skip: usize) -> Option<Vec<u8>> {
        let mut text = Text::of(text);
        text.go_on(&Text::of(next), skip).ok()?;
        Some(text.bytes().to_vec())
    }

    #[test]
    fn what_a_link_makes_of_a_path_begins_where_the_request_began() {
        let goes_on = |text: &str, next: &str, skip| gone_on(text.as_bytes(), next.as_bytes(), skip);
        assert_eq!(goes_on("d/l", "d/other", 0).as_deref(), Some(&b"d/other"[..]));
        assert_eq!(goes_on("d/l", "/other", 0).as_deref(), Some(&b"/other"[..]));
        assert_eq!(goes_on("/at/mnt/d/l", "/other", 2).as_deref(), Some(&b"/other"[..]));
        assert_eq!(goes_on("//at/./mnt/d/l", "d/other", 2).as_deref(), Some(&b"//at/./mnt/d/other"[..]));
        assert_eq!(goes_on("/l", "other", 0).as_deref(), Some(&b"/other"[..]));
        assert_eq!(goes_on("/at/l", &"x".repeat(PATH_MAX), 1), None);
    }
}
