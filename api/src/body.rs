//! An HTTP body fed through a bounded channel, from a blocking thread or a task.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame};
use tokio::sync::mpsc;

/// Records that wait in the channel; with more the sender waits. At most 1 MiB each.
const RECORDS_MAX: usize = 4;

/// The receiving end, to be sent.
#[derive(Debug)]
pub struct ChannelBody(mpsc::Receiver<Bytes>);

/// A channel and the body that drains it. The body ends when the sender is dropped.
pub fn channel() -> (mpsc::Sender<Bytes>, axum::body::Body) {
    let (sender, receiver) = mpsc::channel(RECORDS_MAX);
    (sender, axum::body::Body::new(ChannelBody(receiver)))
}

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0
            .poll_recv(cx)
            .map(|bytes| bytes.map(|b| Ok(Frame::data(b))))
    }
}
