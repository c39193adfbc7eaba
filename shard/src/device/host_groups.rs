//! The groups that a rank belongs to in an epoch, over the host's memory, whatever it computes on.

use std::time::{Duration, Instant};

use trireme_collectives::{CollectiveError, World};

#[derive(Default)]
pub struct HostGroups {
    world: Option<World>,
    /// Spent in operations since it was taken last.
    time: Duration,
}

impl HostGroups {
    pub fn join(&mut self, world: World) {
        self.world = Some(world);
    }

    /// Operations fail until the next [`Self::join`].
    pub fn leave(&mut self) {
        self.world = None;
    }

    /// Runs one operation and counts its time.
    ///
    /// # Errors
    /// Those of the operation, or this rank has joined no group.
    pub fn run<T>(
        &mut self,
        operation: impl FnOnce(&mut World) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let start = Instant::now();
        let world = self.world.as_mut().ok_or(CollectiveError::Mismatch {
            operation: "collective",
            detail: "this rank has joined no group".into(),
        })?;
        let result = operation(world);
        self.time += start.elapsed();
        result
    }

    /// The longest any later single wait may take.
    ///
    /// # Errors
    /// This rank has joined no group.
    pub fn set_deadline(&mut self, deadline: Duration) -> Result<(), CollectiveError> {
        self.run(|world| {
            world.tensor.set_deadline(deadline);
            world.global.set_deadline(deadline);
            Ok(())
        })
    }

    pub fn take_time(&mut self) -> Duration {
        std::mem::take(&mut self.time)
    }
}

#[cfg(feature = "cuda")]
impl HostGroups {
    /// Ranks that sum and sample together.
    pub fn tensor_ranks(&self) -> usize {
        self.world.as_ref().map_or(1, |world| world.tensor.size())
    }

    /// Whether there is no other rank.
    pub fn is_alone(&self) -> bool {
        self.world.as_ref().is_none_or(|world| world.global.size() == 1)
    }
}
