//! RocksDB by the C interface of its shared library, loaded at run time: a baseline of benchmarks, never a part of a node.
//!
//! ```text
//!   open(directory, options) ─▶ get, put, delete: any thread, blocking ─▶ drop closes the database
//! ```
//! The library is not linked: without it, [`RocksDb::open`] fails and everything else works. Unsafe code: loading the library, and its
//! functions, whose signatures are those of `rocksdb/c.h` 7.8. Tested below, if the library is installed.

use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_uchar, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{self, NonNull};

/// File name of the library: Debian's `librocksdb7.8`, which `rocksdb-tools` installs.
pub const ROCKSDB_LIBRARY: &str = "librocksdb.so.7.8";

/// Why RocksDB refused a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RocksDbError {
    /// The library or one of its functions is missing.
    #[error("{ROCKSDB_LIBRARY} cannot be loaded (Debian: apt-get install rocksdb-tools): {0}")]
    Library(String),
    /// RocksDB's own message.
    #[error("{0}")]
    Failed(String),
}

type Object = *mut c_void;
type ErrorOut = *mut *mut c_char;

/// The functions used, of `rocksdb/c.h`.
struct Functions {
    options_create: unsafe extern "C" fn() -> Object,
    options_destroy: unsafe extern "C" fn(Object),
    options_from_string: unsafe extern "C" fn(Object, *const c_char, Object, ErrorOut),
    open: unsafe extern "C" fn(Object, *const c_char, ErrorOut) -> Object,
    close: unsafe extern "C" fn(Object),
    write_options_create: unsafe extern "C" fn() -> Object,
    write_options_destroy: unsafe extern "C" fn(Object),
    write_options_set_sync: unsafe extern "C" fn(Object, c_uchar),
    read_options_create: unsafe extern "C" fn() -> Object,
    read_options_destroy: unsafe extern "C" fn(Object),
    put: unsafe extern "C" fn(Object, Object, *const u8, usize, *const u8, usize, ErrorOut),
    get_pinned: unsafe extern "C" fn(Object, Object, *const u8, usize, ErrorOut) -> Object,
    slice_value: unsafe extern "C" fn(Object, *mut usize) -> *const u8,
    slice_destroy: unsafe extern "C" fn(Object),
    delete: unsafe extern "C" fn(Object, Object, *const u8, usize, ErrorOut),
    property_value: unsafe extern "C" fn(Object, *const c_char) -> *mut c_char,
    free: unsafe extern "C" fn(Object),
}

/// The symbol of a function.
fn function<T: Copy>(library: &Library, name: &str) -> Result<T, RocksDbError> {
    // SAFETY: `T` is the type that `Functions` declares for the symbol, which is that of the header.
    let symbol = unsafe { library.get::<T>(name) };
    symbol.map(|symbol| *symbol).map_err(|error| RocksDbError::Library(error.to_string()))
}

impl Functions {
    fn load(library: &Library) -> Result<Functions, RocksDbError> {
        Ok(Functions {
            options_create: function(library, "rocksdb_options_create")?,
            options_destroy: function(library, "rocksdb_options_destroy")?,
            options_from_string: function(library, "rocksdb_get_options_from_string")?,
            open: function(library, "rocksdb_open")?,
            close: function(library, "rocksdb_close")?,
            write_options_create: function(library, "rocksdb_writeoptions_create")?,
            write_options_destroy: function(library, "rocksdb_writeoptions_destroy")?,
            write_options_set_sync: function(library, "rocksdb_writeoptions_set_sync")?,
            read_options_create: function(library, "rocksdb_readoptions_create")?,
            read_options_destroy: function(library, "rocksdb_readoptions_destroy")?,
            put: function(library, "rocksdb_put")?,
            get_pinned: function(library, "rocksdb_get_pinned")?,
            slice_value: function(library, "rocksdb_pinnableslice_value")?,
            slice_destroy: function(library, "rocksdb_pinnableslice_destroy")?,
            delete: function(library, "rocksdb_delete")?,
            property_value: function(library, "rocksdb_property_value")?,
            free: function(library, "rocksdb_free")?,
        })
    }

    /// Runs a call with a place for its message, and returns what it returned.
    fn checked<T>(&self, call: impl FnOnce(ErrorOut) -> T) -> Result<T, RocksDbError> {
        let mut message: *mut c_char = ptr::null_mut();
        let returned = call(&raw mut message);
        match self.take_text(message) {
            Some(text) => Err(RocksDbError::Failed(text)),
            None => Ok(returned),
        }
    }

    /// Copies and frees a text that RocksDB allocated; `None` for a null pointer.
    fn take_text(&self, text: *mut c_char) -> Option<String> {
        let text = NonNull::new(text)?;
        // SAFETY: RocksDB returns texts that end with a zero byte, and this one is freed only below.
        let copy = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
        // SAFETY: RocksDB allocated the text, and nothing refers to it any more.
        unsafe { (self.free)(text.as_ptr().cast()) };
        Some(copy)
    }
}

/// An open database. All methods may be called by several threads at once; they block.
pub struct RocksDb {
    functions: Functions,
    /// Keeps the code of `functions` loaded.
    _library: Library,
    database: Object,
    options: [Object; 2],
    /// Without and with a sync.
    write_options: [Object; 2],
    read_options: Object,
}

// SAFETY: a rocksdb_t is safe for use by several threads without other synchronisation (rocksdb/c.h, rocksdb/db.h), and the option
// objects are only read after `open`.
unsafe impl Send for RocksDb {}
// SAFETY: as above.
unsafe impl Sync for RocksDb {}

impl RocksDb {
    /// Opens the database in a directory, or creates it. `options` are RocksDB's own, in the form `name=value;name={name=value}`.
    ///
    /// # Errors
    /// A missing library, invalid options, or a directory that cannot be opened.
    pub fn open(directory: &Path, options: &str) -> Result<RocksDb, RocksDbError> {
        // SAFETY: the library's initialisers are those of RocksDB and its dependencies, which set up their own static data.
        let library = unsafe { Library::new(ROCKSDB_LIBRARY) };
        let library = library.map_err(|error| RocksDbError::Library(error.to_string()))?;
        let functions = Functions::load(&library)?;
        let no_zero = |_| RocksDbError::Failed("a zero byte in the directory or the options".to_owned());
        let directory = CString::new(directory.as_os_str().as_bytes()).map_err(no_zero)?;
        let text = CString::new(format!("create_if_missing=true;{options}")).map_err(no_zero)?;
        // SAFETY: takes nothing.
        let base = unsafe { (functions.options_create)() };
        // SAFETY: takes nothing.
        let parsed = unsafe { (functions.options_create)() };
        // SAFETY: takes nothing.
        let read_options = unsafe { (functions.read_options_create)() };
        // SAFETY: takes nothing.
        let write_options = [(); 2].map(|()| unsafe { (functions.write_options_create)() });
        // SAFETY: the object was created above.
        unsafe { (functions.write_options_set_sync)(write_options[1], 1) };
        let mut opened = RocksDb {
            functions,
            _library: library,
            database: ptr::null_mut(),
            options: [base, parsed],
            write_options,
            read_options,
        };
        let functions = &opened.functions;
        functions.checked(|error| {
            // SAFETY: both objects live, and the text ends with a zero byte.
            unsafe { (functions.options_from_string)(base, text.as_ptr(), parsed, error) }
        })?;
        opened.database = functions.checked(|error| {
            // SAFETY: the options live, and the path ends with a zero byte.
            unsafe { (functions.open)(parsed, directory.as_ptr(), error) }
        })?;
        Ok(opened)
    }

    /// Stores a value; with `sync` it is on the medium when this returns.
    ///
    /// # Errors
    /// RocksDB's message.
    pub fn put(&self, key: &[u8], value: &[u8], sync: bool) -> Result<(), RocksDbError> {
        let options = self.write_options[usize::from(sync)];
        let (key, key_bytes, value, value_bytes) = (key.as_ptr(), key.len(), value.as_ptr(), value.len());
        self.functions.checked(|error| {
            // SAFETY: database and options live as long as `self`; pointers and lengths are of slices that outlive the call.
            unsafe { (self.functions.put)(self.database, options, key, key_bytes, value, value_bytes, error) }
        })
    }

    /// Passes the value of a key to `read`; `None` without the key.
    ///
    /// # Errors
    /// RocksDB's message.
    pub fn get<T>(&self, key: &[u8], read: impl FnOnce(&[u8]) -> T) -> Result<Option<T>, RocksDbError> {
        let functions = &self.functions;
        let slice = functions.checked(|error| {
            // SAFETY: as in `put`.
            unsafe {
                (functions.get_pinned)(self.database, self.read_options, key.as_ptr(), key.len(), error)
            }
        })?;
        if slice.is_null() {
            return Ok(None);
        }
        let mut value_bytes = 0;
        // SAFETY: the slice lives until it is destroyed below.
        let value = unsafe { (functions.slice_value)(slice, &raw mut value_bytes) };
        let result = match value_bytes {
            0 => read(&[]),
            // SAFETY: the value has this number of bytes, and lives and does not change until the slice is destroyed.
            _ => read(unsafe { std::slice::from_raw_parts(value, value_bytes) }),
        };
        // SAFETY: nothing refers to the slice any more.
        unsafe { (functions.slice_destroy)(slice) };
        Ok(Some(result))
    }

    /// Deletes a key, whether it exists or not.
    ///
    /// # Errors
    /// RocksDB's message.
    pub fn delete(&self, key: &[u8], sync: bool) -> Result<(), RocksDbError> {
        let options = self.write_options[usize::from(sync)];
        self.functions.checked(|error| {
            // SAFETY: as in `put`.
            unsafe { (self.functions.delete)(self.database, options, key.as_ptr(), key.len(), error) }
        })
    }

    /// A property of the database, such as `rocksdb.stats`; `None` for an unknown one.
    pub fn property(&self, name: &CStr) -> Option<String> {
        // SAFETY: the database lives, and the name ends with a zero byte.
        let text = unsafe { (self.functions.property_value)(self.database, name.as_ptr()) };
        self.functions.take_text(text)
    }
}

impl Drop for RocksDb {
    fn drop(&mut self) {
        let functions = &self.functions;
        if !self.database.is_null() {
            // SAFETY: no call runs, since this is the only reference.
            unsafe { (functions.close)(self.database) };
        }
        // SAFETY: the database that used it is closed, and it is destroyed once.
        unsafe { (functions.read_options_destroy)(self.read_options) };
        for options in self.write_options {
            // SAFETY: as above.
            unsafe { (functions.write_options_destroy)(options) };
        }
        for options in self.options {
            // SAFETY: as above.
            unsafe { (functions.options_destroy)(options) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tests' packages install the library (scripts/install-test-packages).
    #[test]
    fn a_database_keeps_its_keys_and_reports_errors() {
        let directory = tempfile::tempdir().expect("a directory");
        let open = |options: &str| RocksDb::open(directory.path(), options);
        let database = open("write_buffer_size=65536").expect("opens");
        database.put(b"key", b"value", true).expect("stores");
        database.put(b"empty", b"", false).expect("stores");
        assert_eq!(database.get(b"key", <[u8]>::to_vec), Ok(Some(b"value".to_vec())));
        assert_eq!(database.get(b"empty", <[u8]>::len), Ok(Some(0)));
        assert_eq!(database.get(b"none", <[u8]>::len), Ok(None));
        assert_eq!(database.property(c"rocksdb.estimate-num-keys").as_deref(), Some("2"));
        assert_eq!(database.property(c"rocksdb.unknown"), None);
        assert!(matches!(open(""), Err(RocksDbError::Failed(text)) if text.contains("lock")), "one opens it");
        drop(database);
        let invalid = open("write_buffer=1").err();
        assert!(
            matches!(&invalid, Some(RocksDbError::Failed(text)) if text.contains("write_buffer")),
            "{invalid:?}"
        );
        let database = open("").expect("opens again");
        database.delete(b"key", true).expect("deletes");
        database.delete(b"never", false).expect("deletes");
        assert_eq!(database.get(b"key", <[u8]>::len), Ok(None));
        assert_eq!(database.get(b"empty", <[u8]>::len), Ok(Some(0)));
    }
}
