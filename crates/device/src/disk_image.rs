//! The contents of a disk for tests, in pages that copies share: a copy costs its pointers, a write the page it touches.
//!
//! In: bytes. Out: the same bytes, and copies of the whole. Tests below.

use std::rc::Rc;

const PAGE_BYTES: usize = 4096;
type Page = [u8; PAGE_BYTES];

/// The contents of a disk. Clones share the pages that neither has written since.
#[derive(Clone, PartialEq, Eq)]
pub struct DiskImage {
    pages: Vec<Rc<Page>>,
    len: usize,
}

impl DiskImage {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies the bytes from `offset` on into `into`.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        assert!(offset + into.len() <= self.len, "bytes beyond the end of an image");
        let mut done = 0;
        while done < into.len() {
            let (page, within, len) = Self::piece(offset + done, into.len() - done);
            into[done..done + len].copy_from_slice(&self.pages[page][within..within + len]);
            done += len;
        }
    }

    /// Replaces the bytes from `offset` on by `bytes`.
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len, "bytes beyond the end of an image");
        let mut done = 0;
        while done < bytes.len() {
            let (page, within, len) = Self::piece(offset + done, bytes.len() - done);
            Rc::make_mut(&mut self.pages[page])[within..within + len]
                .copy_from_slice(&bytes[done..done + len]);
            done += len;
        }
    }

    /// All bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.read(0, &mut bytes);
        bytes
    }

    /// The page that holds `offset`, the place in it, and how many of `left` bytes lie in that page.
    fn piece(offset: usize, left: usize) -> (usize, usize, usize) {
        let within = offset % PAGE_BYTES;
        (offset / PAGE_BYTES, within, left.min(PAGE_BYTES - within))
    }
}

impl From<Vec<u8>> for DiskImage {
    fn from(bytes: Vec<u8>) -> DiskImage {
        let zeros = Rc::new([0; PAGE_BYTES]);
        let page_of = |chunk: &[u8]| {
            if *chunk == zeros[..chunk.len()] {
                return Rc::clone(&zeros);
            }
            let mut page = [0; PAGE_BYTES];
            page[..chunk.len()].copy_from_slice(chunk);
            Rc::new(page)
        };
        DiskImage { pages: bytes.chunks(PAGE_BYTES).map(page_of).collect(), len: bytes.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_cross_pages_and_the_last_page_may_be_short() {
        let bytes: Vec<u8> = (0..2 * PAGE_BYTES + 512).map(|at| (at / 512 + 1) as u8).collect();
        let mut image = DiskImage::from(bytes.clone());
        assert_eq!((image.len(), image.is_empty()), (bytes.len(), false));
        assert!(image.to_vec() == bytes);
        image.write(PAGE_BYTES - 1, &[91; PAGE_BYTES + 2]);
        let mut found = [0; PAGE_BYTES + 4];
        image.read(PAGE_BYTES - 2, &mut found);
        assert_eq!((found[0], found[PAGE_BYTES + 3]), (8, 17));
        assert!(found[1..PAGE_BYTES + 3].iter().all(|&byte| byte == 91));
    }

    #[test]
    fn a_write_to_a_copy_leaves_the_original() {
        let original = DiskImage::from(vec![0; 3 * PAGE_BYTES]);
        let mut copy = original.clone();
        assert!(copy == original);
        copy.write(PAGE_BYTES + 7, &[1]);
        assert!(copy != original && original.to_vec() == vec![0; 3 * PAGE_BYTES]);
        copy.write(PAGE_BYTES + 7, &[0]);
        assert!(copy == original, "equal bytes in pages of their own");
    }

    #[test]
    #[should_panic(expected = "beyond the end")]
    fn a_read_beyond_the_end_panics() {
        DiskImage::from(vec![0; 512]).read(1, &mut [0; 512]);
    }
}
