// Python face of core/image_processing.h and core/visual_shape.h.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "ATen/ops/from_blob.h"
#include "bindings/register.h"
#include "core/image_processing.h"
#include "core/visual_shape.h"

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

/// Binds preprocess_images or preprocess_videos.
template <class Options>
auto preprocess(Patches (*run)(const std::vector<at::Tensor>&, const Options&)) {
  return [run](const std::vector<Pixels>& pixels, const Options& options) {
    std::vector<at::Tensor> views;
    views.reserve(pixels.size());
    for (const Pixels& each : pixels) views.push_back(view_of(each));
    const py::gil_scoped_release released;
    Patches patches = run(views, options);
    return std::pair(std::move(patches.pixel_values), std::move(patches.grid_thw));
  };
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

  py::class_<VideoOptions>(module, "VideoOptions", "What video_preprocessor_config.json says.")
      .def(py::init<>())
      .def_readwrite("frames", &VideoOptions::frames)
      .def_property(
          "bounds_frames",
          [](const VideoOptions& self) { return self.bound == VideoBound::kFrame; },
          [](VideoOptions& self, bool frames) {
            self.bound = frames ? VideoBound::kFrame : VideoBound::kVolume;
          })
      .def_readwrite("cap_pixels_per_frame", &VideoOptions::cap_pixels_per_frame)
      .def_readwrite("max_video_tokens", &VideoOptions::max_video_tokens)
      .def("check", &check_video_options, "Raise InputError where two settings contradict.");

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
  module.def(
      "processed_video_size",
      [](int64_t frames, int64_t height, int64_t width, const VideoOptions& options) {
        return as_pair(processed_video_size(frames, {height, width}, options));
      },
      py::arg("frames"), py::arg("height"), py::arg("width"), py::arg("options"),
      "(height, width) at which the frames of a video are cut into patches.");
  py::class_<VisualShape>(module, "VisualShape", "The sizes of an image or a video on its way in.")
      .def_property_readonly("resized",
                             [](const VisualShape& self) { return as_pair(self.resized); })
      .def_readonly("temporal_groups", &VisualShape::temporal_groups)
      .def_readonly("repeated_frames", &VisualShape::repeated_frames)
      .def_property_readonly("grid", [](const VisualShape& self) { return as_pair(self.grid); })
      .def_readonly("patch_positions", &VisualShape::patch_positions)
      .def_readonly("visual_tokens", &VisualShape::visual_tokens);
  module.def(
      "image_shape",
      [](int64_t height, int64_t width, const ImageOptions& options) {
        return image_shape({height, width}, options);
      },
      py::arg("height"), py::arg("width"), py::arg("options"), "The shape of a resized image.");
  module.def(
      "video_shape",
      [](int64_t frames, int64_t height, int64_t width, const ImageOptions& options) {
        return video_shape(frames, {height, width}, options);
      },
      py::arg("frames"), py::arg("height"), py::arg("width"), py::arg("options"),
      "The shape of a video whose frames were resized already.");
  module.def("with_token_budget", &with_token_budget, py::arg("options"), py::arg("tokens"),
             "The options with max_pixels for a number of visual tokens.");
  module.def("preprocess_images", preprocess(&preprocess_images), py::arg("images"),
             py::arg("options"),
             "Patches [rows, 3 * T * P * P] and grids [images, 3] of uint8 arrays [H, W, 3].");
  module.def("preprocess_videos", preprocess(&preprocess_videos), py::arg("videos"),
             py::arg("options"), "The same of uint8 arrays [F, H, W, 3]; grids [videos, 3].");
}

}  // namespace vlscope
