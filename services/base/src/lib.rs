//! Common parts of the daemon's services: names of problems ([`code`]), their reports ([`found`]), the
//! cluster as they look at it ([`view`]), and how they wait ([`waiting`]).

pub mod code;
pub mod failures;
pub mod found;
pub mod view;
pub mod waiting;
