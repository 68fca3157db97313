// Python face of core/image_processing.h.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "ATen/ops/from_blob.h"
#include "bindings/register.h"
#include "core/image_processing.h"

namespace py = pybind11;

namespace vlscope {
namespace {

using Pixels = py::array_t<uint8_t>;

// A view of an array's memory, read-only arrays included; the array has to outlive it.
at::Tensor view_of(const Pixels& pixels) {
  const std::vector<int64_t> sizes(pixels.shape(), pixels.shape() + pixels.ndim());
  const std::vector<int64_t> strides(pixels.strides(), pixels.strides() + pixels.ndim());
  return at::from_blob(const_cast<uint8_t*>(pixels.data()), sizes, strides, at::kByte);
}

std::pair<at::Tensor, at::Tensor> preprocess(const std::vector<Pixels>& images,
                                             const ImageOptions& options) {
  std::vector<at::Tensor> views;
  views.reserve(images.size());
  for (const Pixels& image : images) views.push_back(view_of(image));
  const py::gil_scoped_release released;
  ImagePatches patches = preprocess_images(views, options);
  return {std::move(patches.pixel_values), std::move(patches.image_grid_thw)};
}

std::pair<int64_t, int64_t> as_pair(ImageSize size) { return {size.height, size.width}; }

}  // namespace

void register_processing(py::module_& module) {
  py::class_<ImageOptions>(module, "ImageOptions", "What preprocessor_config.json says.")
      .def(py::init<>())
      .def_readwrite("patch_size", &ImageOptions::patch_size)
      .def_readwrite("temporal_patch_size", &ImageOptions::temporal_patch_size)
      .def_readwrite("merge_size", &ImageOptions::merge_size)
      .def_property(
          "min_pixels", [](const ImageOptions& self) { return self.limits.min_pixels; },
          [](ImageOptions& self, int64_t value) { self.limits.min_pixels = value; })
      .def_property(
          "max_pixels", [](const ImageOptions& self) { return self.limits.max_pixels; },
          [](ImageOptions& self, int64_t value) { self.limits.max_pixels = value; })
      .def_readwrite("do_resize", &ImageOptions::do_resize)
      .def_readwrite("do_rescale", &ImageOptions::do_rescale)
      .def_readwrite("do_normalize", &ImageOptions::do_normalize)
      .def_readwrite("rescale_factor", &ImageOptions::rescale_factor)
      .def_readwrite("image_mean", &ImageOptions::image_mean)
      .def_readwrite("image_std", &ImageOptions::image_std)
      .def("check", &check_image_options, "Raise InputError where two settings contradict.");

  module.def(
      "smart_resize",
      [](int64_t height, int64_t width, int64_t factor, int64_t min_pixels, int64_t max_pixels) {
        return as_pair(smart_resize({height, width}, factor, {min_pixels, max_pixels}));
      },
      py::arg("height"), py::arg("width"), py::arg("factor"), py::arg("min_pixels"),
      py::arg("max_pixels"),
      "(height, width) after resizing: multiples of `factor`, area within the limits.");
  module.def(
      "processed_size",
      [](int64_t height, int64_t width, const ImageOptions& options) {
        return as_pair(processed_size({height, width}, options));
      },
      py::arg("height"), py::arg("width"), py::arg("options"),
      "(height, width) at which an image is cut into patches.");
  module.def("preprocess_images", &preprocess, py::arg("images"), py::arg("options"),
             "Patches [rows, 3 * T * P * P] and grids [images, 3] of uint8 arrays [H, W, 3].");
}

}  // namespace vlscope
