//! How often a change is tried again.

use namespace::Error;

use crate::backend::Backend;
use crate::client::Client;
use crate::failure::Failure;
use crate::session::SESSIONS_TRIED_MAX;

/// How often a file is looked at again because another host changed it meanwhile: for about 15 s. Then the
/// guest gets EIO.
const CHANGED_TRIES_MAX: u32 = 320;

/// Failures so far.
#[derive(Default)]
pub(crate) struct Tries {
    changed: u32,
    sessions: usize,
}

impl Tries {
    /// Returns if the change is to be tried again, after a pause if others need one.
    pub(crate) async fn again<B: Backend>(
        &mut self,
        client: &Client<B>,
        failure: Failure,
    ) -> Result<(), Failure> {
        match failure {
            // Retired segments are sealed once what is under way in them is over.
            Failure::Refused(error @ (Error::Changed | Error::TooManyOpen))
                if self.changed < CHANGED_TRIES_MAX =>
            {
                if error == Error::Changed {
                    client.counters.changed_meanwhile.add(1);
                }
                client.pause(self.changed).await;
                self.changed += 1;
                Ok(())
            }
            // Another segment, or another session.
            Failure::SessionOver | Failure::Refused(Error::TooManyGaps)
                if self.sessions < SESSIONS_TRIED_MAX =>
            {
                self.sessions += 1;
                Ok(())
            }
            failure => Err(failure),
        }
    }
}
