//! The functions of libcephfs's low-level interface and their types, as `libcephfs.h` and `ceph_ll_client.h` of Ceph 16.2 declare them.

use crate::error::MountError;
use libc::{c_char, c_int, c_uint, c_void, dev_t, dirent, flock, gid_t, mode_t, size_t, statvfs, timespec, uid_t};
use std::sync::OnceLock;

/// Its version has been 2 since 2016.
const LIBRARY: &str = "libcephfs.so.2";

/// `struct ceph_mount_info`.
#[repr(C)]
pub(crate) struct RawMount([u8; 0]);

/// `struct Inode`.
#[repr(C)]
pub(crate) struct RawInode([u8; 0]);

/// `struct Fh`, an open file.
#[repr(C)]
pub(crate) struct RawFile([u8; 0]);

/// `struct ceph_dir_result`, an open directory.
#[repr(C)]
pub(crate) struct RawDirectory([u8; 0]);

/// `struct UserPerm`: whose call it is.
#[repr(C)]
pub(crate) struct RawUser([u8; 0]);

/// `struct ceph_statx`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Statx {
    pub mask: u32,
    pub block_size: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    pub mode: u16,
    pub inode: u64,
    pub size: u64,
    pub blocks: u64,
    pub device: dev_t,
    pub of_device: dev_t,
    pub accessed: timespec,
    pub changed: timespec,
    pub modified: timespec,
    pub born: timespec,
    pub version: u64,
}

/// `struct ceph_client_callback_args`, of which only the umask is asked for.
#[repr(C)]
pub(crate) struct Callbacks {
    pub handle: *mut c_void,
    pub inode: Option<unsafe extern "C" fn()>,
    pub name: Option<unsafe extern "C" fn()>,
    pub interrupt: Option<unsafe extern "C" fn()>,
    pub remount: Option<unsafe extern "C" fn()>,
    pub umask: Option<unsafe extern "C" fn(*mut c_void) -> mode_t>,
    pub release: Option<unsafe extern "C" fn()>,
}

/// Of [`Statx`]: all that is asked for (`CEPH_STATX_BASIC_STATS` and `CEPH_STATX_VERSION`).
pub(crate) const STATX_WANTED: c_uint = 0x17ff;

/// What becomes of the session that is reclaimed: it ends, and its client may do nothing any more (`CEPH_RECLAIM_RESET`).
pub(crate) const RECLAIM_RESET: c_uint = 1;

macro_rules! functions {
    ($($name:ident($($argument:ty),* $(,)?) $(-> $result:ty)?;)*) => {
        /// What is called.
        #[allow(non_snake_case)]
        pub(crate) struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn find(library: &libloading::Library) -> Result<Self, MountError> {
                Ok(Self {
                    // SAFETY: the symbol is a function of libcephfs, whose header declares it with these types in every version that
                    // has it; the library is never unloaded, so the function stays where it is.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(|source| MountError::Function { function: stringify!($name), source })?,)*
                })
            }
        }
    };
}

functions! {
    ceph_version(*mut c_int, *mut c_int, *mut c_int) -> *const c_char;
    ceph_create(*mut *mut RawMount, *const c_char) -> c_int;
    ceph_release(*mut RawMount) -> c_int;
    ceph_conf_read_file(*mut RawMount, *const c_char) -> c_int;
    ceph_conf_set(*mut RawMount, *const c_char, *const c_char) -> c_int;
    ceph_init(*mut RawMount) -> c_int;
    ceph_select_filesystem(*mut RawMount, *const c_char) -> c_int;
    ceph_mount(*mut RawMount, *const c_char) -> c_int;
    ceph_unmount(*mut RawMount) -> c_int;
    ceph_start_reclaim(*mut RawMount, *const c_char, c_uint) -> c_int;
    ceph_finish_reclaim(*mut RawMount);
    ceph_set_uuid(*mut RawMount, *const c_char);
    ceph_sync_fs(*mut RawMount) -> c_int;
    ceph_userperm_new(uid_t, gid_t, c_int, *mut gid_t) -> *mut RawUser;
    ceph_userperm_destroy(*mut RawUser);
    ceph_ll_register_callbacks(*mut RawMount, *mut Callbacks);
    ceph_ll_lookup_root(*mut RawMount, *mut *mut RawInode) -> c_int;
    ceph_ll_lookup(*mut RawMount, *mut RawInode, *const c_char, *mut *mut RawInode, *mut Statx, c_uint, c_uint, *const RawUser) -> c_int;
    ceph_ll_put(*mut RawMount, *mut RawInode) -> c_int;
    ceph_ll_getattr(*mut RawMount, *mut RawInode, *mut Statx, c_uint, c_uint, *const RawUser) -> c_int;
    ceph_ll_setattr(*mut RawMount, *mut RawInode, *mut Statx, c_int, *const RawUser) -> c_int;
    ceph_ll_open(*mut RawMount, *mut RawInode, c_int, *mut *mut RawFile, *const RawUser) -> c_int;
    ceph_ll_read(*mut RawMount, *mut RawFile, i64, u64, *mut c_char) -> c_int;
    ceph_ll_write(*mut RawMount, *mut RawFile, i64, u64, *const c_char) -> c_int;
    ceph_ll_fsync(*mut RawMount, *mut RawFile, c_int) -> c_int;
    ceph_ll_sync_inode(*mut RawMount, *mut RawInode, c_int) -> c_int;
    ceph_ll_fallocate(*mut RawMount, *mut RawFile, c_int, i64, i64) -> c_int;
    ceph_ll_setlk(*mut RawMount, *mut RawFile, *mut flock, u64, c_int) -> c_int;
    ceph_ll_close(*mut RawMount, *mut RawFile) -> c_int;
    ceph_ll_create(*mut RawMount, *mut RawInode, *const c_char, mode_t, c_int, *mut *mut RawInode, *mut *mut RawFile, *mut Statx, c_uint, c_uint, *const RawUser) -> c_int;
    ceph_ll_mknod(*mut RawMount, *mut RawInode, *const c_char, mode_t, dev_t, *mut *mut RawInode, *mut Statx, c_uint, c_uint, *const RawUser) -> c_int;
    ceph_ll_mkdir(*mut RawMount, *mut RawInode, *const c_char, mode_t, *mut *mut RawInode, *mut Statx, c_uint, c_uint, *const RawUser) -> c_int;
    ceph_ll_symlink(*mut RawMount, *mut RawInode, *const c_char, *const c_char, *mut *mut RawInode, *mut Statx, c_uint, c_uint, *const RawUser) -> c_int;
    ceph_ll_link(*mut RawMount, *mut RawInode, *mut RawInode, *const c_char, *const RawUser) -> c_int;
    ceph_ll_unlink(*mut RawMount, *mut RawInode, *const c_char, *const RawUser) -> c_int;
    ceph_ll_rmdir(*mut RawMount, *mut RawInode, *const c_char, *const RawUser) -> c_int;
    ceph_ll_rename(*mut RawMount, *mut RawInode, *const c_char, *mut RawInode, *const c_char, *const RawUser) -> c_int;
    ceph_ll_readlink(*mut RawMount, *mut RawInode, *mut c_char, size_t, *const RawUser) -> c_int;
    ceph_ll_opendir(*mut RawMount, *mut RawInode, *mut *mut RawDirectory, *const RawUser) -> c_int;
    ceph_ll_releasedir(*mut RawMount, *mut RawDirectory) -> c_int;
    ceph_readdirplus_r(*mut RawMount, *mut RawDirectory, *mut dirent, *mut Statx, c_uint, c_uint, *mut *mut RawInode) -> c_int;
    ceph_seekdir(*mut RawMount, *mut RawDirectory, i64);
    ceph_ll_getxattr(*mut RawMount, *mut RawInode, *const c_char, *mut c_void, size_t, *const RawUser) -> c_int;
    ceph_ll_setxattr(*mut RawMount, *mut RawInode, *const c_char, *const c_void, size_t, c_int, *const RawUser) -> c_int;
    ceph_ll_listxattr(*mut RawMount, *mut RawInode, *mut c_char, size_t, *mut size_t, *const RawUser) -> c_int;
    ceph_ll_removexattr(*mut RawMount, *mut RawInode, *const c_char, *const RawUser) -> c_int;
    ceph_ll_statfs(*mut RawMount, *mut RawInode, *mut statvfs) -> c_int;
}

/// The library's functions; it is loaded by the first call that succeeds, for as long as the process lives.
pub(crate) fn functions() -> Result<&'static Functions, MountError> {
    // The library is kept with them: its threads outlive whoever loaded it.
    static LOADED: OnceLock<(Functions, libloading::Library)> = OnceLock::new();
    if let Some((functions, _)) = LOADED.get() {
        return Ok(functions);
    }
    // SAFETY: what the library does when it is loaded (constructors of its C++ objects) asks nothing of the process.
    let library = unsafe { libloading::Library::new(LIBRARY) }.map_err(MountError::Library)?;
    let functions = Functions::find(&library)?;
    Ok(&LOADED.get_or_init(|| (functions, library)).0)
}
