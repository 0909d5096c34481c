//! OCI images: importing them into layers that unions take as lower branches, and storing their configuration.
//!
//! An image is imported from an OCI layout, a `docker save` archive, a root filesystem in an archive or in a directory. Each of its layers
//! is unpacked once into `layers/DIGEST/` of the state directory, in the form that a union takes as a lower branch, and shared by every
//! image that has it; `images/NAME.json` lists an image's layers and keeps how its programs are started. These two are persistent state;
//! there is no cache. Begin with [`ImageStore`].
//!
//! A directory of a CephFS may have the same form, and be the store of many hosts ([`ClusterStore`]). A state directory then has only the
//! record of such an image, and `hosts/NAME/HOST` of the store says which hosts have it ([`Holder`]).
//!
//! **Assumptions.** Archives are hostile until shown otherwise: digests are verified, sizes bounded, and every path is walked by the kernel
//! with the layer's directory as its root, so that nothing outside can be reached. After any error nothing of the image stays.

mod archive;
mod commit;
mod decompress;
mod digest;
mod directory;
mod error;
mod holders;
mod layers;
mod layout;
mod limits;
mod pax;
mod record;
mod source;
mod store;
#[cfg(test)]
mod tests;
mod tree;
mod unpack;

pub use commit::{Base, Staged};
pub use digest::Digest;
pub use error::{ImageError, Result};
pub use holders::Holder;
pub use layers::LayerRecord;
pub use layout::write_layout;
pub use limits::{Limits, Progress, Silent};
pub use record::{ClusterStore, ImageConfig, ImageRecord, check_name, layer_in, store_of};
pub use source::Source;
pub use store::{IMAGES_NAME, ImageStore, Removed, StoreLock};
