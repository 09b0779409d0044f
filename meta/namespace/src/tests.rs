//! Tests of whole operations. The model in `tests/model.rs` says what each must do.

mod acts;
mod directory;
mod encoding;
mod extents;
mod model;
mod orphans;
mod proptests;
mod rename;
mod session;
mod world;
