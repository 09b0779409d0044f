//! What the daemon's services have in common: how problems are named ([`code`]) and told ([`found`]), the
//! cluster as they look at it ([`view`]), and how they wait ([`waiting`]).

pub mod code;
pub mod failures;
pub mod found;
pub mod view;
pub mod waiting;
