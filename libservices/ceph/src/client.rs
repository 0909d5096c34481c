//! A libcephfs mount and what it hands out, each given back when it is dropped, and its calls with Rust's types.

use crate::error::MountError;
use crate::functions::{
    Callbacks, Functions, RECLAIM_RESET, RawDirectory, RawFile, RawInode, RawMount, RawUser, STATX_WANTED, Statx,
    functions,
};
use crate::settings::{KEEPING, SETTINGS};
use crate::source::Source;
use libc::{c_char, c_int, c_short, c_void, mode_t};
use poolfs_types::{Caller, Errno};
use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// What one call answers.
pub(crate) type Answer<T> = Result<T, Errno>;

/// Linux's number; nothing else here knows it.
const ENOTRECOVERABLE: Errno = Errno::from_raw(libc::ENOTRECOVERABLE);

thread_local! {
    /// What the running call takes from the mode of what it makes.
    static UMASK: Cell<mode_t> = const { Cell::new(0) };
}

/// libcephfs asks this within the call that makes something, where the directory has no default access list.
unsafe extern "C" fn umask(_: *mut c_void) -> mode_t {
    UMASK.get()
}

/// The number in a negative answer.
fn check(answer: c_int) -> Answer<usize> {
    usize::try_from(answer).map_err(|_| Errno::from_raw(answer.wrapping_neg()))
}

fn text(what: &'static str, bytes: &[u8]) -> Result<CString, MountError> {
    CString::new(bytes).map_err(|_| MountError::Argument { what })
}

/// A name, or the like, for a call. What comes here has been checked.
fn terminated(bytes: &[u8]) -> Answer<CString> {
    CString::new(bytes).map_err(|_| Errno::EINVAL)
}

/// Whose call it is, for libcephfs.
struct User {
    functions: &'static Functions,
    raw: NonNull<RawUser>,
}

impl User {
    fn new(functions: &'static Functions, uid: u32, gid: u32) -> Answer<Self> {
        // SAFETY: no list of groups is passed, and its length is 0.
        let raw = unsafe { (functions.ceph_userperm_new)(uid, gid, 0, null_mut()) };
        NonNull::new(raw).map(|raw| Self { functions, raw }).ok_or(Errno::ENOMEM)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // SAFETY: it was made by `ceph_userperm_new`, and nothing else has it.
        unsafe { (self.functions.ceph_userperm_destroy)(self.raw.as_ptr()) }
    }
}

/// The version of libcephfs, as 16.2.15.
///
/// # Errors
/// When it cannot be loaded.
pub fn library_version() -> Result<String, MountError> {
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: the three numbers are written to; the text that is answered is not looked at.
    let _ = unsafe { (functions()?.ceph_version)(&raw mut major, &raw mut minor, &raw mut patch) };
    Ok(format!("{major}.{minor}.{patch}"))
}

/// A mount; it ends when this is dropped, and with it the session.
pub(crate) struct Client {
    functions: &'static Functions,
    mount: NonNull<RawMount>,
    is_mounted: bool,
    root: User,
}

// SAFETY: libcephfs locks within each call what the call uses; the pointers are not changed after the mount.
unsafe impl Send for Client {}
// SAFETY: as above.
unsafe impl Sync for Client {}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: whatever the mount has handed out holds the client and has been given back, so nobody uses the mount any more.
        unsafe {
            if self.is_mounted {
                (self.functions.ceph_unmount)(self.mount.as_ptr());
            }
            (self.functions.ceph_release)(self.mount.as_ptr());
        }
    }
}

/// One reference on an inode of a mount.
pub(crate) struct Inode {
    client: Arc<Client>,
    raw: NonNull<RawInode>,
}

// SAFETY: libcephfs locks what it finds by the pointer.
unsafe impl Send for Inode {}
// SAFETY: as above.
unsafe impl Sync for Inode {}

impl Drop for Inode {
    fn drop(&mut self) {
        // SAFETY: this is the one reference that it stands for.
        unsafe { (self.client.functions.ceph_ll_put)(self.client.mount.as_ptr(), self.raw.as_ptr()) };
    }
}

/// An open file.
pub(crate) struct OpenFile {
    client: Arc<Client>,
    raw: NonNull<RawFile>,
}

// SAFETY: libcephfs locks what it finds by the pointer.
unsafe impl Send for OpenFile {}
// SAFETY: as above.
unsafe impl Sync for OpenFile {}

impl Drop for OpenFile {
    fn drop(&mut self) {
        // SAFETY: it was opened by this mount, and nothing uses it any more.
        unsafe { (self.client.functions.ceph_ll_close)(self.client.mount.as_ptr(), self.raw.as_ptr()) };
    }
}

/// An open directory. Its place is a part of it: one thread at a time lists it.
pub(crate) struct OpenDirectory {
    client: Arc<Client>,
    raw: NonNull<RawDirectory>,
}

// SAFETY: it belongs to no thread.
unsafe impl Send for OpenDirectory {}

impl Drop for OpenDirectory {
    fn drop(&mut self) {
        // SAFETY: it was opened by this mount, and nothing uses it any more.
        unsafe { (self.client.functions.ceph_ll_releasedir)(self.client.mount.as_ptr(), self.raw.as_ptr()) };
    }
}

/// One name of a listing.
pub(crate) struct Listed {
    pub name: Vec<u8>,
    pub found: Statx,
    /// Where the listing goes on behind it.
    pub next: i64,
}

impl Client {
    /// Connects to the cluster and mounts the directory.
    pub fn mount(source: &Source) -> Result<Arc<Self>, MountError> {
        let functions = functions()?;
        let user = source.user.as_deref().unwrap_or("admin");
        let path = text("the directory", Path::new("/").join(&source.path).as_os_str().as_bytes())?;
        let refused = |source_of: Errno| MountError::Mount {
            path: source.path.clone(),
            user: user.to_owned(),
            source: source_of,
        };
        let id = text("the user", user.as_bytes())?;
        let root = User::new(functions, 0, 0).map_err(refused)?;
        let mut mount = null_mut();
        // SAFETY: `mount` is written to, and `id` is a text that outlives the call.
        check(unsafe { (functions.ceph_create)(&raw mut mount, id.as_ptr()) }).map_err(refused)?;
        let mount = NonNull::new(mount).ok_or_else(|| refused(Errno::ENOMEM))?;
        let mut client = Self { functions, mount, is_mounted: false, root };
        client.configure(source)?;
        let named = source.filesystem.as_ref().map(|name| text("the filesystem", name.as_bytes())).transpose()?;
        let holder = source.holder.as_ref().map(|holder| text("the holder", holder.as_bytes())).transpose()?;
        let raw = mount.as_ptr();
        let reclaim = |holder: &CString| {
            // SAFETY: the mount is initialized and not mounted; the name is a text that outlives the calls.
            unsafe {
                let reclaimed = check((functions.ceph_start_reclaim)(raw, holder.as_ptr(), RECLAIM_RESET));
                (functions.ceph_finish_reclaim)(raw);
                (functions.ceph_set_uuid)(raw, holder.as_ptr());
                match reclaimed {
                    // There is no such session, or there is nothing left of it.
                    Err(Errno::ENOENT | ENOTRECOVERABLE) => Ok(0),
                    other => other,
                }
            }
        };
        let mut callbacks = Callbacks {
            handle: null_mut(),
            inode: None,
            name: None,
            interrupt: None,
            remount: None,
            umask: Some(umask),
            release: None,
        };
        // SAFETY: the mount was created above, is configured and not mounted yet; the texts and the callbacks outlive their calls, and the
        // one function that is registered lives as long as the program.
        let mounted = unsafe {
            check((functions.ceph_init)(raw))
                .and_then(|_| named.map_or(Ok(0), |name| check((functions.ceph_select_filesystem)(raw, name.as_ptr()))))
                .and_then(|_| holder.as_ref().map_or(Ok(0), reclaim))
                .and_then(|_| check((functions.ceph_mount)(raw, path.as_ptr())))
                .inspect(|_| (functions.ceph_ll_register_callbacks)(raw, &raw mut callbacks))
        };
        mounted.map_err(refused)?;
        client.is_mounted = true;
        Ok(Arc::new(client))
    }

    fn configure(&self, source: &Source) -> Result<(), MountError> {
        let file = source.configuration.as_ref();
        let name = file.map(|file| text("the configuration's name", file.as_os_str().as_bytes())).transpose()?;
        let name = name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        // SAFETY: the name is a text that outlives the call, or null, which stands for Ceph's own places.
        let read = check(unsafe { (self.functions.ceph_conf_read_file)(self.mount.as_ptr(), name) });
        read.map_err(|source| MountError::Configuration { file: file.cloned(), source })?;
        for (option, value) in SETTINGS {
            self.set(option, value.as_bytes())?;
        }
        // What is kept is kept above this layer, if something there does that.
        self.set("client_oc", source.is_shared.to_string().as_bytes())?;
        for (option, bytes) in KEEPING {
            self.set(option, bytes.to_string().as_bytes())?;
        }
        source.keyring.as_ref().map_or(Ok(()), |file| self.set("keyring", file.as_os_str().as_bytes()))
    }

    fn set(&self, option: &'static str, value: &[u8]) -> Result<(), MountError> {
        let (name, value) = (text(option, option.as_bytes())?, text(option, value)?);
        // SAFETY: both are texts that outlive the call.
        let set = check(unsafe { (self.functions.ceph_conf_set)(self.mount.as_ptr(), name.as_ptr(), value.as_ptr()) });
        set.map(drop).map_err(|source| MountError::Setting { option, source })
    }

    /// The mounted directory.
    pub fn root(self: &Arc<Self>) -> Answer<Inode> {
        let mut inode = null_mut();
        // SAFETY: the mount is mounted; `inode` is written to.
        check(unsafe { (self.functions.ceph_ll_lookup_root)(self.mount.as_ptr(), &raw mut inode) })?;
        self.inode(inode)
    }

    fn inode(self: &Arc<Self>, raw: *mut RawInode) -> Answer<Inode> {
        let raw = NonNull::new(raw).ok_or(Errno::EIO)?;
        Ok(Inode { client: Arc::clone(self), raw })
    }

    fn raw(&self) -> *mut RawMount {
        self.mount.as_ptr()
    }

    fn root_user(&self) -> *const RawUser {
        self.root.raw.as_ptr()
    }

    /// What a call answered that gives a reference and attributes.
    fn found(self: &Arc<Self>, call: impl FnOnce(*mut *mut RawInode, *mut Statx) -> c_int) -> Answer<(Inode, Statx)> {
        let (mut inode, mut found) = (null_mut(), MaybeUninit::<Statx>::zeroed());
        check(call(&raw mut inode, found.as_mut_ptr()))?;
        let inode = self.inode(inode)?;
        // SAFETY: all of it was zero, which is a value of each of its fields, and libcephfs has filled in what it knows.
        Ok((inode, unsafe { found.assume_init() }))
    }

    /// The same for what makes something for `caller`, under whose umask it is called.
    fn made(
        self: &Arc<Self>,
        caller: &Caller,
        call: impl FnOnce(*mut *mut RawInode, *mut Statx, *const RawUser) -> c_int,
    ) -> Answer<(Inode, Statx)> {
        let user = User::new(self.functions, caller.uid, caller.gid)?;
        UMASK.set(caller.umask & 0o777);
        let made = self.found(|inode, found| call(inode, found, user.raw.as_ptr()));
        UMASK.set(0);
        made
    }

    /// Makes everything durable that this mount has written.
    pub fn sync(&self) -> Answer<()> {
        // SAFETY: the mount is mounted.
        check(unsafe { (self.functions.ceph_sync_fs)(self.raw()) }).map(drop)
    }
}

impl Inode {
    /// Which inode of the mount it is, as long as somebody holds it.
    pub fn identity(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    fn raw(&self) -> *mut RawInode {
        self.raw.as_ptr()
    }

    pub fn lookup(&self, name: &[u8]) -> Answer<(Self, Statx)> {
        let (client, name) = (&self.client, terminated(name)?);
        // SAFETY: the inode is held, the name is a text, and the results are written to.
        client.found(|inode, found| unsafe {
            let lookup = client.functions.ceph_ll_lookup;
            lookup(client.raw(), self.raw(), name.as_ptr(), inode, found, STATX_WANTED, 0, client.root_user())
        })
    }

    pub fn attributes(&self) -> Answer<Statx> {
        let client = &self.client;
        let mut found = MaybeUninit::<Statx>::zeroed();
        // SAFETY: the inode is held, and the result is written to.
        check(unsafe {
            let getattr = client.functions.ceph_ll_getattr;
            getattr(client.raw(), self.raw(), found.as_mut_ptr(), STATX_WANTED, 0, client.root_user())
        })?;
        // SAFETY: all of it was zero, which is a value of each of its fields.
        Ok(unsafe { found.assume_init() })
    }

    /// Changes what `mask` names (`CEPH_SETATTR_*`), and leaves in `values` what is so then.
    pub fn set_attributes(&self, values: &mut Statx, mask: c_int) -> Answer<()> {
        let client = &self.client;
        let set = client.functions.ceph_ll_setattr;
        // SAFETY: the inode is held, and the values are read and written to.
        check(unsafe { set(client.raw(), self.raw(), values, mask, client.root_user()) }).map(drop)
    }

    pub fn open(&self, flags: c_int) -> Answer<OpenFile> {
        let client = &self.client;
        let mut file = null_mut();
        // SAFETY: the inode is held, and the result is written to.
        check(unsafe {
            (client.functions.ceph_ll_open)(client.raw(), self.raw(), flags, &raw mut file, client.root_user())
        })?;
        let raw = NonNull::new(file).ok_or(Errno::EIO)?;
        Ok(OpenFile { client: Arc::clone(client), raw })
    }

    pub fn create(&self, caller: &Caller, name: &[u8], mode: u32, flags: c_int) -> Answer<(Self, Statx, OpenFile)> {
        let (client, name) = (&self.client, terminated(name)?);
        let mut file = null_mut();
        // SAFETY: the inode is held, the name is a text, and the results are written to.
        let made = client.made(caller, |inode, found, user| unsafe {
            let create = client.functions.ceph_ll_create;
            let (at, file) = (self.raw(), &raw mut file);
            create(client.raw(), at, name.as_ptr(), mode, flags, inode, file, found, STATX_WANTED, 0, user)
        });
        let file = NonNull::new(file).map(|raw| OpenFile { client: Arc::clone(client), raw });
        let (inode, found) = made?;
        Ok((inode, found, file.ok_or(Errno::EIO)?))
    }

    pub fn make_node(&self, caller: &Caller, name: &[u8], mode: u32, device: u64) -> Answer<(Self, Statx)> {
        let (client, name) = (&self.client, terminated(name)?);
        // SAFETY: the inode is held, the name is a text, and the results are written to.
        client.made(caller, |inode, found, user| unsafe {
            let make = client.functions.ceph_ll_mknod;
            make(client.raw(), self.raw(), name.as_ptr(), mode, device, inode, found, STATX_WANTED, 0, user)
        })
    }

    pub fn make_directory(&self, caller: &Caller, name: &[u8], mode: u32) -> Answer<(Self, Statx)> {
        let (client, name) = (&self.client, terminated(name)?);
        // SAFETY: the inode is held, the name is a text, and the results are written to.
        client.made(caller, |inode, found, user| unsafe {
            let make = client.functions.ceph_ll_mkdir;
            make(client.raw(), self.raw(), name.as_ptr(), mode, inode, found, STATX_WANTED, 0, user)
        })
    }

    pub fn make_symlink(&self, caller: &Caller, name: &[u8], target: &[u8]) -> Answer<(Self, Statx)> {
        let (client, name, target) = (&self.client, terminated(name)?, terminated(target)?);
        // SAFETY: the inode is held, both texts outlive the call, and the results are written to.
        client.made(caller, |inode, found, user| unsafe {
            let make = client.functions.ceph_ll_symlink;
            make(client.raw(), self.raw(), name.as_ptr(), target.as_ptr(), inode, found, STATX_WANTED, 0, user)
        })
    }

    pub fn link(&self, parent: &Self, name: &[u8]) -> Answer<()> {
        let (client, name) = (&self.client, terminated(name)?);
        let link = client.functions.ceph_ll_link;
        // SAFETY: both inodes are held, and the name is a text.
        check(unsafe { link(client.raw(), self.raw(), parent.raw(), name.as_ptr(), client.root_user()) }).map(drop)
    }

    pub fn unlink(&self, name: &[u8]) -> Answer<()> {
        let (client, name) = (&self.client, terminated(name)?);
        let unlink = client.functions.ceph_ll_unlink;
        // SAFETY: the inode is held, and the name is a text.
        check(unsafe { unlink(client.raw(), self.raw(), name.as_ptr(), client.root_user()) }).map(drop)
    }

    pub fn remove_directory(&self, name: &[u8]) -> Answer<()> {
        let (client, name) = (&self.client, terminated(name)?);
        let remove = client.functions.ceph_ll_rmdir;
        // SAFETY: the inode is held, and the name is a text.
        check(unsafe { remove(client.raw(), self.raw(), name.as_ptr(), client.root_user()) }).map(drop)
    }

    pub fn rename(&self, name: &[u8], parent: &Self, new_name: &[u8]) -> Answer<()> {
        let (client, from, to) = (&self.client, terminated(name)?, terminated(new_name)?);
        let rename = client.functions.ceph_ll_rename;
        // SAFETY: both inodes are held, and both names are texts.
        let renamed =
            unsafe { rename(client.raw(), self.raw(), from.as_ptr(), parent.raw(), to.as_ptr(), client.root_user()) };
        check(renamed).map(drop)
    }

    /// Fills `buffer` with a symbolic link's target; how many bytes that are.
    pub fn read_link(&self, buffer: &mut [u8]) -> Answer<usize> {
        let client = &self.client;
        let read = client.functions.ceph_ll_readlink;
        // SAFETY: the inode is held, and no more is written than the buffer has.
        check(unsafe { read(client.raw(), self.raw(), buffer.as_mut_ptr().cast(), buffer.len(), client.root_user()) })
    }

    pub fn open_directory(&self) -> Answer<OpenDirectory> {
        let client = &self.client;
        let mut directory = null_mut();
        // SAFETY: the inode is held, and the result is written to.
        check(unsafe {
            (client.functions.ceph_ll_opendir)(client.raw(), self.raw(), &raw mut directory, client.root_user())
        })?;
        let raw = NonNull::new(directory).ok_or(Errno::EIO)?;
        Ok(OpenDirectory { client: Arc::clone(client), raw })
    }

    /// Makes attributes and names durable, of a file also its content.
    pub fn sync(&self) -> Answer<()> {
        let client = &self.client;
        // SAFETY: the inode is held.
        check(unsafe { (client.functions.ceph_ll_sync_inode)(client.raw(), self.raw(), 0) }).map(drop)
    }

    /// Fills `value`, which has room for a byte at least; how many bytes it has. `ERANGE` where there is no room for all.
    pub fn xattr(&self, name: &CStr, value: &mut [u8]) -> Answer<usize> {
        let client = &self.client;
        let get = client.functions.ceph_ll_getxattr;
        let (to, room) = (value.as_mut_ptr().cast::<c_void>(), value.len());
        // SAFETY: the inode is held, the name is a text, and no more is written than there is room for.
        check(unsafe { get(client.raw(), self.raw(), name.as_ptr(), to, room, client.root_user()) })
    }

    pub fn set_xattr(&self, name: &CStr, value: &[u8], flags: c_int) -> Answer<()> {
        let client = &self.client;
        let set = client.functions.ceph_ll_setxattr;
        let (from, length) = (value.as_ptr().cast::<c_void>(), value.len());
        // SAFETY: the inode is held, the name is a text, and the value has so many bytes.
        check(unsafe { set(client.raw(), self.raw(), name.as_ptr(), from, length, flags, client.root_user()) })
            .map(drop)
    }

    pub fn remove_xattr(&self, name: &CStr) -> Answer<()> {
        let client = &self.client;
        let remove = client.functions.ceph_ll_removexattr;
        // SAFETY: the inode is held, and the name is a text.
        check(unsafe { remove(client.raw(), self.raw(), name.as_ptr(), client.root_user()) }).map(drop)
    }

    /// Fills `list` with names, each with a zero behind it; how many bytes they have. `ERANGE` where there is no room.
    pub fn xattr_names(&self, list: &mut [u8]) -> Answer<usize> {
        let client = &self.client;
        let names = client.functions.ceph_ll_listxattr;
        let mut length = 0;
        let (to, room) = (list.as_mut_ptr().cast::<c_char>(), list.len());
        // SAFETY: the inode is held, no more is written than there is room for, and the length is written to.
        check(unsafe { names(client.raw(), self.raw(), to, room, &raw mut length, client.root_user()) })?;
        Ok(length.min(room))
    }

    pub fn space(&self) -> Answer<libc::statvfs> {
        let client = &self.client;
        let mut space = MaybeUninit::<libc::statvfs>::zeroed();
        // SAFETY: the inode is held, and the result is written to.
        check(unsafe { (client.functions.ceph_ll_statfs)(client.raw(), self.raw(), space.as_mut_ptr()) })?;
        // SAFETY: all of it was zero, which is a value of each of its fields.
        Ok(unsafe { space.assume_init() })
    }
}

/// A byte that no file has: where it begins, and how long it is.
const BEHIND_FILES: (i64, i64) = (i64::MAX - 1, 1);

/// That others who ask for it do not have the place behind a file's end.
pub(crate) struct LockedEnd<'a>(&'a OpenFile);

impl Drop for LockedEnd<'_> {
    fn drop(&mut self) {
        // Where the cluster does not answer that, it goes with the open file.
        let _ = self.0.set_lock(libc::F_UNLCK, BEHIND_FILES, false);
    }
}

impl OpenFile {
    /// Locks all of it against other clients, and other openings: as POSIX locks do that nobody waits for. The lock goes when it is closed.
    pub fn lock(&self, alone: bool) -> Answer<()> {
        self.set_lock(if alone { libc::F_WRLCK } else { libc::F_RDLCK }, (0, 0), false)
    }

    /// Keeps others who ask for this from the place behind the last that any file has, until it is dropped; waits for whoever has it.
    pub fn lock_end(&self) -> Answer<LockedEnd<'_>> {
        self.set_lock(libc::F_WRLCK, BEHIND_FILES, true).map(|()| LockedEnd(self))
    }

    fn set_lock(&self, kind: c_int, (start, length): (i64, i64), waits: bool) -> Answer<()> {
        let client = &self.client;
        // SAFETY: all of it zero is a value of each of its fields.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = c_short::try_from(kind).map_err(|_| Errno::EINVAL)?;
        (lock.l_start, lock.l_len) = (start, length);
        let (set, file) = (client.functions.ceph_ll_setlk, self.raw.as_ptr());
        // No two that are open have the same address, so each is an owner of its own.
        let owner = file as u64;
        // SAFETY: the file is open, and the lock is read within the call.
        check(unsafe { set(client.raw(), file, &raw mut lock, owner, c_int::from(waits)) }).map(drop)
    }

    pub fn read(&self, offset: i64, buffer: &mut [u8]) -> Answer<usize> {
        let client = &self.client;
        let read = client.functions.ceph_ll_read;
        let (to, room) = (buffer.as_mut_ptr().cast::<c_char>(), buffer.len() as u64);
        // SAFETY: the file is open, and no more is written than there is room for.
        check(unsafe { read(client.raw(), self.raw.as_ptr(), offset, room, to) }).map(|count| count.min(buffer.len()))
    }

    pub fn write(&self, offset: i64, data: &[u8]) -> Answer<usize> {
        let client = &self.client;
        let write = client.functions.ceph_ll_write;
        // SAFETY: the file is open, and the data has so many bytes.
        let written =
            unsafe { write(client.raw(), self.raw.as_ptr(), offset, data.len() as u64, data.as_ptr().cast()) };
        check(written).map(|count| count.min(data.len()))
    }

    pub fn sync(&self, only_data: bool) -> Answer<()> {
        let client = &self.client;
        // SAFETY: the file is open.
        let synced = unsafe { (client.functions.ceph_ll_fsync)(client.raw(), self.raw.as_ptr(), only_data.into()) };
        check(synced).map(drop)
    }

    pub fn allocate(&self, mode: c_int, offset: i64, length: i64) -> Answer<()> {
        let client = &self.client;
        let allocate = client.functions.ceph_ll_fallocate;
        // SAFETY: the file is open.
        check(unsafe { allocate(client.raw(), self.raw.as_ptr(), mode, offset, length) }).map(drop)
    }
}

impl OpenDirectory {
    /// Goes to a place of the listing; 0 begins it anew.
    pub fn seek(&mut self, place: i64) {
        let client = &self.client;
        // SAFETY: the directory is open.
        unsafe { (client.functions.ceph_seekdir)(client.raw(), self.raw.as_ptr(), place) }
    }

    /// The next name; nothing behind the last.
    pub fn next(&mut self) -> Answer<Option<Listed>> {
        let client = &self.client;
        let next = client.functions.ceph_readdirplus_r;
        let (mut entry, mut found) = (MaybeUninit::<libc::dirent>::zeroed(), MaybeUninit::<Statx>::zeroed());
        let (to, attributes) = (entry.as_mut_ptr(), found.as_mut_ptr());
        // SAFETY: the directory is open, and the results are written to; no inode is asked for.
        if check(unsafe { next(client.raw(), self.raw.as_ptr(), to, attributes, STATX_WANTED, 0, null_mut()) })? == 0 {
            return Ok(None);
        }
        // SAFETY: all of both was zero, which is a value of each of their fields.
        let (entry, found) = unsafe { (entry.assume_init(), found.assume_init()) };
        let name = entry.d_name.iter().map(|&byte| byte.cast_unsigned()).take_while(|&byte| byte != 0).collect();
        Ok(Some(Listed { name, found, next: entry.d_off }))
    }
}
