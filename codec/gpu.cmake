# SPDX-License-Identifier: Apache-2.0
#
# gpu.cmake: the codecs' CUDA kernels. nvcc makes one image (a fatbin) of each .cu, and the images
# become bytes of kvf_codec (codec_gpu_image.h). CUDA is no language of this project: that would
# link its run-time library, while all that is needed at run time is the driver, and kvferry opens
# that itself.
#
# Sets KVF_HAVE_CUDA and KVF_NVCC_VERSION, and defines kvf_gpu_images.

set(KVF_CUDA_ARCHITECTURES "90" CACHE STRING
    "GPU architectures to compile for, ascending; GPUs newer than the last get its PTX")
set(KVF_HAVE_CUDA 0)
if(NOT KVF_CUDA STREQUAL "OFF")
    find_program(KVF_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
                 PATH_SUFFIXES bin)
    if(KVF_NVCC)
        execute_process(COMMAND ${KVF_NVCC} --version OUTPUT_VARIABLE kvf_nvcc_says ERROR_QUIET)
        if(kvf_nvcc_says MATCHES "release ([0-9]+\\.[0-9]+)")
            set(KVF_NVCC_VERSION ${CMAKE_MATCH_1})
        endif()
    endif()
    if(KVF_NVCC_VERSION VERSION_GREATER_EQUAL 12.0)
        set(KVF_HAVE_CUDA 1)
    elseif(NOT KVF_CUDA STREQUAL "AUTO")
        message(FATAL_ERROR "KVF_CUDA=ON but there is no nvcc of CUDA 12.0 or later: "
                            "install the CUDA Toolkit, or set CUDA_HOME")
    endif()
endif()

# Bits have to equal those of the C codecs: no fused multiply-add but where it is written, no
# flushing of subnormals, correctly rounded division.
set(kvf_nvcc_flags -std=c++17 -O3 -fmad=false -ftz=false -prec-div=true -lineinfo
    -I${PROJECT_SOURCE_DIR} -I${PROJECT_SOURCE_DIR}/client/include -Xcompiler=-Wall)
foreach(architecture ${KVF_CUDA_ARCHITECTURES})
    list(APPEND kvf_nvcc_flags -gencode=arch=compute_${architecture},code=sm_${architecture})
    set(kvf_nvcc_ptx -gencode=arch=compute_${architecture},code=compute_${architecture})
endforeach()
list(APPEND kvf_nvcc_flags ${kvf_nvcc_ptx})

# kvf_gpu_images(target list name ...): compile name.cu of this folder and put the images into
# target, as a list of this name (struct kvf_gpu_image[]). Without nvcc the list is empty.
function(kvf_gpu_images target list)
    set(KVF_GPU_IMAGE_LIST ${list})
    set(KVF_GPU_IMAGE_BYTES "")
    set(KVF_GPU_IMAGE_ENTRIES "")
    set(fatbins "")
    foreach(name ${ARGN})
        if(NOT KVF_HAVE_CUDA)
            break()
        endif()
        set(source ${CMAKE_CURRENT_SOURCE_DIR}/${name}.cu)
        set(fatbin ${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin)
        add_custom_command(
            OUTPUT ${fatbin}
            COMMAND ${KVF_NVCC} ${kvf_nvcc_flags} -fatbin -MD -MF ${fatbin}.d -MT ${fatbin}
                    -o ${fatbin} ${source}
            DEPENDS ${source}
            DEPFILE ${fatbin}.d
            COMMENT "Building kernels ${name}.fatbin"
            VERBATIM)
        list(APPEND fatbins ${fatbin})
        string(APPEND KVF_GPU_IMAGE_BYTES "KVF_IMAGE(${name}, \"${fatbin}\")\n")
        string(APPEND KVF_GPU_IMAGE_ENTRIES
               "    {\"${name}\", kvf_gpu_${name}, kvf_gpu_${name}_end},\n")
    endforeach()
    set(images ${CMAKE_CURRENT_BINARY_DIR}/${list}.c)
    configure_file(${PROJECT_SOURCE_DIR}/codec/codec_gpu_image.c.in ${images} @ONLY)
    set_source_files_properties(${images} PROPERTIES OBJECT_DEPENDS "${fatbins}")
    target_sources(${target} PRIVATE ${images})
endfunction()
