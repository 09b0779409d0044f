//! Extended attributes, with Linux's errors.

use crate::error::{Error, Failure};
use crate::ids::Ino;
use crate::keys::XATTRS;
use crate::operation::{Outcome, XattrMode};
use crate::record::{Inode, Xattr};
use crate::update::Update;

/// Bytes of an attribute's name. A longer one is refused with ERANGE.
pub const XATTR_NAME_MAX: usize = 255;

/// Bytes of an attribute's value. A longer one is refused with E2BIG.
pub const XATTR_VALUE_MAX: usize = 65_536;

/// Bytes of an inode's list of names, each with the 0 behind it: Linux's XATTR_LIST_MAX, beyond which
/// listxattr(2) fails. More is refused with ENOSPC.
pub const XATTR_LIST_MAX: u32 = 65_536;

/// Bytes of all values of an inode: two of full size. More is refused with ENOSPC.
pub const XATTR_VALUES_MAX: u32 = 131_072;

const CLASSES: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];

/// Refuses what cannot be an attribute's name.
pub(crate) fn check_name(name: &[u8]) -> Result<(), Error> {
    if name.is_empty() || name.len() > XATTR_NAME_MAX {
        return Err(Error::AttributeNameRange);
    }
    let rest = CLASSES.iter().find_map(|class| name.strip_prefix(*class));
    match rest {
        None => Err(Error::Unsupported),
        Some([]) => Err(Error::Invalid),
        Some(_) if name.contains(&0) => Err(Error::Invalid),
        Some(_) => Ok(()),
    }
}

/// Bytes of a name in the list.
fn list_bytes(name: &[u8]) -> u32 {
    u32::try_from(name.len() + 1).expect("names are bounded")
}

fn value_bytes(value: &[u8]) -> u32 {
    u32::try_from(value.len()).expect("values are bounded")
}

pub(crate) fn set(
    update: &mut Update<'_, '_>,
    ino: Ino,
    name: &[u8],
    value: &[u8],
    mode: XattrMode,
) -> Result<Outcome, Failure> {
    check_name(name)?;
    if value.len() > XATTR_VALUE_MAX {
        return Err(Error::ValueTooLong.into());
    }
    let mut inode = update.inode(ino)?;
    let old = update.get(&XATTRS, &(ino, name))?;
    match (mode, &old) {
        (XattrMode::Create, Some(_)) => return Err(Error::Exists.into()),
        (XattrMode::Replace, None) => return Err(Error::NoAttribute.into()),
        _ => {}
    }
    if let Some(Xattr(old)) = old {
        inode.xattr_list_bytes -= list_bytes(name);
        inode.xattr_value_bytes -= value_bytes(&old);
    }
    inode.xattr_list_bytes += list_bytes(name);
    inode.xattr_value_bytes += value_bytes(value);
    if inode.xattr_list_bytes > XATTR_LIST_MAX || inode.xattr_value_bytes > XATTR_VALUES_MAX {
        return Err(Error::NoSpace.into());
    }
    update.put(&XATTRS, &(ino, name), &Xattr(value.to_vec()));
    update.put_changed(ino, &mut inode);
    Ok(Outcome::Done)
}

pub(crate) fn remove(
    update: &mut Update<'_, '_>,
    ino: Ino,
    name: &[u8],
) -> Result<Outcome, Failure> {
    check_name(name)?;
    let mut inode = update.inode(ino)?;
    let value = update
        .get(&XATTRS, &(ino, name))?
        .ok_or(Error::NoAttribute)?;
    take_away(update, ino, &mut inode, name, &value);
    update.put_changed(ino, &mut inode);
    Ok(Outcome::Done)
}

/// Removes an attribute that is there. The caller writes the inode.
pub(crate) fn take_away(
    update: &mut Update<'_, '_>,
    ino: Ino,
    inode: &mut Inode,
    name: &[u8],
    Xattr(value): &Xattr,
) {
    inode.xattr_list_bytes -= list_bytes(name);
    inode.xattr_value_bytes -= value_bytes(value);
    update.delete(&XATTRS, &(ino, name));
}
