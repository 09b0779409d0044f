//! Tests of whole operations. The model in `tests/model.rs` says what each must do.

mod acts;
mod directory;
mod encoding;
mod expected;
mod extents;
mod model;
mod orphans;
mod proptests;
mod removal;
mod rename;
mod search;
mod session;
mod temporary;
mod world;
