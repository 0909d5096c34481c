//! libcephfs by the POSIX calls of its own, as a program that is linked to it uses them: a mount with the object cache on.

use anyhow::{Context, Result};
use libc::{c_char, c_int, mode_t};
use std::ffi::CString;
use std::fmt::Display;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::null_mut;

/// Its version has been 2 since 2016.
const LIBRARY: &str = "libcephfs.so.2";

/// `struct ceph_mount_info`.
#[repr(C)]
struct RawMount([u8; 0]);

macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        #[allow(non_snake_case)]
        struct Functions {
            $($name: unsafe extern "C" fn(*mut RawMount, $($argument),*) -> c_int,)*
            ceph_create: unsafe extern "C" fn(*mut *mut RawMount, *const c_char) -> c_int,
        }

        impl Functions {
            fn find(library: &libloading::Library) -> Result<Self> {
                Ok(Self {
                    // SAFETY: `libcephfs.h` declares these functions with these types, and the library is never unloaded.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }?,)*
                    // SAFETY: the same.
                    ceph_create: *unsafe { library.get(b"ceph_create\0") }?,
                })
            }
        }
    };
}

functions! {
    ceph_release();
    ceph_conf_read_file(*const c_char);
    ceph_mount(*const c_char);
    ceph_unmount();
    ceph_mkdirs(*const c_char, mode_t);
    ceph_open(*const c_char, c_int, mode_t);
    ceph_close(c_int);
    ceph_read(c_int, *mut c_char, i64, i64);
    ceph_write(c_int, *const c_char, i64, i64);
    ceph_fsync(c_int, c_int);
    ceph_unlink(*const c_char);
    ceph_stat(*const c_char, *mut libc::stat);
}

/// A mounted filesystem. Its threads may be used by several threads of the program at once.
pub struct Mount {
    raw: *mut RawMount,
    functions: Functions,
    /// Never unloaded: its threads may outlive a mount.
    _library: ManuallyDrop<libloading::Library>,
}

// SAFETY: libcephfs locks what belongs to a mount, whose calls any thread may make; the pointer does not change.
unsafe impl Send for Mount {}
// SAFETY: the same.
unsafe impl Sync for Mount {}

/// An open file of a mount.
pub struct File<'m> {
    mount: &'m Mount,
    descriptor: c_int,
}

impl Mount {
    /// Mounts the root of the filesystem that Ceph's `configuration` names. A mount that fails leaves the library's object behind.
    pub fn new(configuration: &Path) -> Result<Self> {
        // SAFETY: the constructors of the library's objects ask nothing of the process.
        let library = unsafe { libloading::Library::new(LIBRARY) }.context("the package libcephfs2 is missing")?;
        let functions = Functions::find(&library)?;
        let configuration = text(configuration)?;
        let mut raw = null_mut();
        // SAFETY: it writes a pointer to the new object to where it is told.
        checked("ceph_create", unsafe { (functions.ceph_create)(&raw mut raw, std::ptr::null()) })?;
        // SAFETY: the object is new, and the text ends with a zero.
        checked("ceph_conf_read_file", unsafe { (functions.ceph_conf_read_file)(raw, configuration.as_ptr()) })?;
        // SAFETY: the same.
        checked("ceph_mount", unsafe { (functions.ceph_mount)(raw, c"/".as_ptr()) })?;
        Ok(Self { raw, functions, _library: ManuallyDrop::new(library) })
    }

    /// Makes a directory, and those above it that are missing.
    pub fn make_directories(&self, path: &Path) -> Result<()> {
        let name = text(path)?;
        // SAFETY: the mount lives, and the text ends with a zero.
        let code = unsafe { (self.functions.ceph_mkdirs)(self.raw, name.as_ptr(), 0o755) };
        if code == -libc::EEXIST {
            return Ok(());
        }
        checked(path.display(), code).map(drop)
    }

    /// Opens a file, with flags and mode of open(2).
    pub fn open(&self, path: &Path, flags: c_int, mode: mode_t) -> Result<File<'_>> {
        let name = text(path)?;
        // SAFETY: the mount lives, and the text ends with a zero.
        let code = unsafe { (self.functions.ceph_open)(self.raw, name.as_ptr(), flags, mode) };
        Ok(File { mount: self, descriptor: checked(path.display(), code)? })
    }

    /// Removes a name.
    pub fn remove(&self, path: &Path) -> Result<()> {
        let name = text(path)?;
        // SAFETY: the mount lives, and the text ends with a zero.
        checked(path.display(), unsafe { (self.functions.ceph_unlink)(self.raw, name.as_ptr()) }).map(drop)
    }

    /// A file's length in bytes, by stat(2).
    pub fn length(&self, path: &Path) -> Result<u64> {
        let name = text(path)?;
        let mut found = MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: the mount lives, the text ends with a zero, and there is room for a stat.
        let code = unsafe { (self.functions.ceph_stat)(self.raw, name.as_ptr(), found.as_mut_ptr()) };
        checked(path.display(), code)?;
        // SAFETY: it has been filled in; all zeroes are a stat, too.
        Ok(u64::try_from(unsafe { found.assume_init() }.st_size)?)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // SAFETY: the files of a mount borrow it, so nobody uses it any more. What is dirty is written here.
        let code = unsafe { (self.functions.ceph_unmount)(self.raw) };
        if code < 0 {
            eprintln!("the filesystem of Ceph cannot be unmounted: {}", io::Error::from_raw_os_error(-code));
            return;
        }
        // SAFETY: it is unmounted, and this was the last use.
        unsafe { (self.functions.ceph_release)(self.raw) };
    }
}

impl File<'_> {
    /// Reads all of a buffer at an offset.
    pub fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let (length, offset) = (i64::try_from(buffer.len())?, i64::try_from(offset)?);
        let read = self.mount.functions.ceph_read;
        // SAFETY: the mount and the descriptor live, and the buffer has so many bytes.
        let code = unsafe { read(self.mount.raw, self.descriptor, buffer.as_mut_ptr().cast(), length, offset) };
        anyhow::ensure!(i64::from(checked("ceph_read", code)?) == length, "{code} bytes of {length}");
        Ok(())
    }

    /// Writes all of a buffer at an offset.
    pub fn write_all_at(&self, buffer: &[u8], offset: u64) -> Result<()> {
        let (length, offset) = (i64::try_from(buffer.len())?, i64::try_from(offset)?);
        let write = self.mount.functions.ceph_write;
        // SAFETY: the mount and the descriptor live, and the buffer has so many bytes.
        let code = unsafe { write(self.mount.raw, self.descriptor, buffer.as_ptr().cast(), length, offset) };
        anyhow::ensure!(i64::from(checked("ceph_write", code)?) == length, "{code} bytes of {length}");
        Ok(())
    }

    /// fsync, or fdatasync.
    pub fn sync(&self, only_data: bool) -> Result<()> {
        let sync = self.mount.functions.ceph_fsync;
        // SAFETY: the mount and the descriptor live.
        checked("ceph_fsync", unsafe { sync(self.mount.raw, self.descriptor, c_int::from(only_data)) }).map(drop)
    }
}

impl Drop for File<'_> {
    fn drop(&mut self) {
        // SAFETY: the mount lives, and nobody uses the descriptor any more.
        let code = unsafe { (self.mount.functions.ceph_close)(self.mount.raw, self.descriptor) };
        if code < 0 {
            eprintln!("a file of Ceph cannot be closed: {}", io::Error::from_raw_os_error(-code));
        }
    }
}

fn text(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).with_context(|| format!("{} has a zero in it", path.display()))
}

/// What a call returned, unless that is the negative number of an error.
fn checked(what: impl Display, code: c_int) -> Result<c_int> {
    if code < 0 {
        return Err(io::Error::from_raw_os_error(-code)).with_context(|| what.to_string());
    }
    Ok(code)
}
