//! Preloaded into a daemon: the wall clock, and it alone, is off by as many seconds as the file says that
//! PENSTOCK_RIG_CLOCK names. The file is mapped, so a change of it is a jump of the clock.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

const CLOCK_REALTIME: c_int = 0;
const CLOCK_REALTIME_COARSE: c_int = 5;
#[cfg(target_arch = "x86_64")]
const SYS_CLOCK_GETTIME: c_long = 228;
#[cfg(target_arch = "aarch64")]
const SYS_CLOCK_GETTIME: c_long = 113;
const PROT_READ: c_int = 1;
const MAP_SHARED: c_int = 1;

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

unsafe extern "C" {
    fn getenv(name: *const c_char) -> *const c_char;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn mmap(at: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void;
    fn syscall(number: c_long, ...) -> c_long;
}

static OFFSET: AtomicPtr<AtomicI64> = AtomicPtr::new(std::ptr::null_mut());
static NONE: AtomicI64 = AtomicI64::new(0);

fn offset() -> &'static AtomicI64 {
    let known = OFFSET.load(Ordering::Relaxed);
    if !known.is_null() {
        // SAFETY: it is NONE or a mapping of eight bytes that is never removed.
        return unsafe { &*known };
    }
    let name: &CStr = c"PENSTOCK_RIG_CLOCK";
    // SAFETY: all of it is called with strings that end in a zero byte, and the mapping is checked for
    // failure.
    let found = unsafe {
        let path = getenv(name.as_ptr());
        let fd = if path.is_null() { -1 } else { open(path, 0) };
        let at = if fd < 0 {
            std::ptr::null_mut()
        } else {
            mmap(std::ptr::null_mut(), 8, PROT_READ, MAP_SHARED, fd, 0)
        };
        if at.is_null() || at.addr() == usize::MAX {
            (&raw const NONE).cast_mut()
        } else {
            at.cast::<AtomicI64>()
        }
    };
    OFFSET.store(found, Ordering::Relaxed);
    // SAFETY: as above.
    unsafe { &*found }
}

/// In the place of the C library's.
///
/// # Safety
/// `at` is a timespec that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: c_int, at: *mut Timespec) -> c_int {
    // SAFETY: the caller promises `at`; the kernel checks it again.
    let result = unsafe { syscall(SYS_CLOCK_GETTIME, clock, at) } as c_int;
    if result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) {
        // SAFETY: the kernel has just written it.
        unsafe { (*at).seconds += offset().load(Ordering::Relaxed) };
    }
    result
}
