//! Counts the C library's allocations of the process that it is preloaded into, in the file that
//! `PENSTOCK_BENCH_ALLOCATIONS` names: eight bytes, shared with the benchmark. Compiled by the benchmark
//! itself.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

const FILE_ENV: &[u8] = b"PENSTOCK_BENCH_ALLOCATIONS\0";
const O_RDWR: c_int = 2;
const PROT_READ_WRITE: c_int = 3;
const MAP_SHARED: c_int = 1;

/// The shared counter, null until the file is mapped.
static COUNTER: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

unsafe extern "C" {
    fn getenv(name: *const c_char) -> *const c_char;
    fn open(path: *const c_char, flags: c_int) -> c_int;
    fn mmap(addr: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void;
    fn __libc_malloc(size: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, size: usize) -> *mut c_void;
    fn __libc_realloc(block: *mut c_void, size: usize) -> *mut c_void;
    fn __libc_memalign(align: usize, size: usize) -> *mut c_void;
}

#[used]
#[unsafe(link_section = ".init_array")]
static MAP_AT_START: extern "C" fn() = map_counter;

extern "C" fn map_counter() {
    // SAFETY: the name ends with NUL; getenv's answer is used before the environment can change.
    let path = unsafe { getenv(FILE_ENV.as_ptr().cast()) };
    if path.is_null() {
        return;
    }
    // SAFETY: `path` is a NUL-terminated string of the environment.
    let fd = unsafe { open(path, O_RDWR) };
    // SAFETY: a new shared mapping at an address of the kernel's choice; an fd of -1 makes it fail.
    let page = unsafe { mmap(std::ptr::null_mut(), 8, PROT_READ_WRITE, MAP_SHARED, fd, 0) };
    if page as isize != -1 {
        COUNTER.store(page.cast(), Ordering::Release);
    }
}

fn count() {
    let counter = COUNTER.load(Ordering::Acquire);
    if !counter.is_null() {
        // SAFETY: the mapping is never unmapped, eight bytes long and aligned to a page.
        unsafe { &*counter }.fetch_add(1, Ordering::Relaxed);
    }
}

/// # Safety
/// As malloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    count();
    // SAFETY: passed on as it came.
    unsafe { __libc_malloc(size) }
}

/// # Safety
/// As calloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(number: usize, size: usize) -> *mut c_void {
    count();
    // SAFETY: passed on as it came.
    unsafe { __libc_calloc(number, size) }
}

/// # Safety
/// As realloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
    count();
    // SAFETY: passed on as it came.
    unsafe { __libc_realloc(block, size) }
}

/// # Safety
/// As posix_memalign(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    const ENOMEM: c_int = 12;
    count();
    // SAFETY: passed on as it came.
    let block = unsafe { __libc_memalign(align, size) };
    if block.is_null() {
        return ENOMEM;
    }
    // SAFETY: the caller gives a pointer to write the result to.
    unsafe { out.write(block) };
    0
}
